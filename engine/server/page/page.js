// Starts the page: the chat, the panels, and the dialog for the key.

import { ApiFailure, call, hasKey, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId, element, setText, whole } from "./dom.js";
import { ExpertPanel } from "./experts.js";
import { History } from "./history.js";
import { showLoad, showMetrics } from "./panels.js";
import { Poller } from "./poller.js";
import { Snapshot } from "./prometheus.js";

const history = new History();
const experts = new ExpertPanel();
const poller = new Poller(poll, showStatus);
let models = null;
let whyNoExperts = ""; // once the server has said that it does not count them

async function loadModels(signal) {
  const answer = await call("/v1/models", { signal });
  models = (await answer.json()).data;
  byId("model").replaceChildren(
    ...models.map((model) => {
      const option = element("option", "", model.id);
      option.value = model.id;
      return option;
    }),
  );
  setText("context", `${models[0].id} · context of ${whole(models[0].max_model_len)} tokens`);
}

async function expertLoad(signal) {
  if (whyNoExperts) return null;
  try {
    return await (await call("/expert_load", { signal })).json();
  } catch (error) {
    if (!(error instanceof ApiFailure && error.status === 404)) throw error;
    whyNoExperts = error.message;
    return null;
  }
}

async function poll(signal) {
  if (models === null) await loadModels(signal);
  const texts = call("/metrics", { signal }).then((response) => response.text());
  const loads = call("/load", { signal }).then((response) => response.json());
  const [text, load, counts] = await Promise.all([texts, loads, expertLoad(signal)]);
  const now = performance.now();
  history.add(new Snapshot(text, now));
  showLoad(load);
  showMetrics(history, load.num_requests_running);
  experts.show(counts, now, whyNoExperts);
}

function showStatus(state, text) {
  byId("status").dataset.state = state;
  setText("status-text", text);
  if (state === "key") keyRefused();
}

function askForKey(reason) {
  setText("key-reason", `${reason} It stays in this tab and is forgotten when the tab is closed.`);
  const dialog = byId("key-dialog");
  if (!dialog.open) dialog.showModal();
}

function keyRefused() {
  askForKey(hasKey() ? "The server does not know this key; type another." : "This server asks for a key.");
}

byId("key-button").addEventListener("click", () => askForKey("The key that this page sends with its requests."));
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("key-form").addEventListener("submit", () => {
  setKey(byId("key").value.trim());
  byId("key").value = "";
  poller.start();
});

new Chat(keyRefused);
poller.start();
byId("message").focus();
