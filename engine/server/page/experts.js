// The panel of expert load: counts since the start, or between the last two readings that differ.

import { byId, setText, short, whole } from "./dom.js";
import { HeatMap } from "./heatmap.js";
import { say } from "./panel.js";

const FRESH_MS = 3000; // the server reads its counts once a second at most; after this long nothing is going on

export class ExpertPanel {
  #map = new HeatMap(
    byId("heat-map"),
    (text) => setText("heat-readout", text),
    (text) => setText("heat-most", text),
  );
  #load = null;
  #before = null;
  #changed = 0;

  constructor() {
    for (const input of document.getElementsByName("span")) input.addEventListener("change", () => this.#draw());
  }

  /** load: the answer of /expert_load at `time` (ms), or null with the reason why there is none. */
  show(load, time, reason) {
    say("experts-panel", load ? "" : reason);
    if (!load) return;
    const hasRestarted = this.#load && load.num_tokens < this.#load.num_tokens;
    if (hasRestarted) this.#load = this.#before = null;
    if (this.#load && load.num_tokens > this.#load.num_tokens) {
      this.#before = this.#load;
      this.#changed = time;
    }
    this.#load = time - this.#changed > FRESH_MS ? this.#settled(load) : load;
    this.#draw();
  }

  #settled(load) {
    this.#before = load;
    return load;
  }

  #draw() {
    const load = this.#load;
    if (!load) return;
    const isLast = document.querySelector("[name=span]:checked").value === "poll";
    const counts = isLast ? difference(load.layers, (this.#before ?? load).layers) : load.layers;
    const tokens = isLast ? load.num_tokens - (this.#before ?? load).num_tokens : load.num_tokens;
    const when = isLast ? "since the last poll" : "since the start";
    const [layers, experts] = [load.layers.length, load.layers[0]?.length ?? 0];
    setText("experts-shape", `${layers} layers × ${experts} experts`);
    setText("imbalance", imbalanceOf(load));
    this.#map.show(counts, load.first_moe_layer, tokens ? `${whole(tokens)} tokens ${when}` : `No tokens ${when}.`);
  }
}

function difference(now, before) {
  return now.map((row, i) => row.map((count, j) => count - before[i][j]));
}

function imbalanceOf(load) {
  const ranks = load.ranks[0]?.length ?? 1;
  if (ranks === 1) return "one rank holds all experts";
  const ratio = load.rank_imbalance_ratio;
  return ratio === null ? `${ranks} ranks` : `${ranks} ranks, the busiest ${short(ratio)}× the mean`;
}
