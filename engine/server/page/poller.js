// Asks for something once a second: never while the tab is hidden, more slowly after failures, not at all without a key.

import { ApiFailure } from "./api.js";

const PERIOD = 1000;
const LONGEST = 30000;
const PATIENCE = 10000; // for one poll
const HIDDEN = ["hidden", "paused while hidden"];

export class Poller {
  #poll;
  #report;
  #timer = 0;
  #running = false;
  #failures = 0;
  #needsKey = false;

  /** poll(signal): promise; report(state, text): live, hidden, failing or key. */
  constructor(poll, report) {
    this.#poll = poll;
    this.#report = report;
    document.addEventListener("visibilitychange", () => this.#visibilityChanged());
  }

  /** Polls now; also after a key was given. */
  start() {
    this.#needsKey = false;
    this.#failures = 0;
    this.#next(0);
  }

  #visibilityChanged() {
    if (document.hidden) {
      clearTimeout(this.#timer);
      this.#report(...HIDDEN);
    } else if (!this.#needsKey) {
      this.#next(0);
    }
  }

  #next(delay) {
    clearTimeout(this.#timer);
    if (!document.hidden) this.#timer = setTimeout(() => this.#run(), delay);
  }

  async #run() {
    if (this.#running) return;
    this.#running = true;
    const started = performance.now();
    try {
      await this.#poll(AbortSignal.timeout(PATIENCE));
      this.#failures = 0;
      this.#report(...(document.hidden ? HIDDEN : ["live", "live"]));
    } catch (error) {
      this.#failed(error);
    } finally {
      this.#running = false;
    }
    if (this.#needsKey) return;
    const period = Math.min(PERIOD * 2 ** this.#failures, LONGEST);
    this.#next(Math.max(period - (performance.now() - started), 0));
  }

  #failed(error) {
    this.#needsKey = error.status === 401;
    if (this.#needsKey) {
      this.#report("key", "needs an API key");
      return;
    }
    this.#failures += 1;
    const wait = Math.min(PERIOD * 2 ** this.#failures, LONGEST) / 1000;
    const reason = error instanceof ApiFailure ? error.message : "The server does not answer.";
    this.#report("failing", `${reason} Next try in ${wait} s.`);
    if (!(error instanceof ApiFailure || error.name === "TimeoutError")) reportError(error); // a fault of this page
  }
}
