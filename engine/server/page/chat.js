// The conversation: what was said, the form it is typed into, and the request that is under way.

import { Answer, STOPPED } from "./answer.js";
import { ApiFailure, call, events, wasEnded } from "./api.js";
import { byId, element, setText } from "./dom.js";
import { requestOf, SettingsError } from "./settings.js";

const NEAR = 60; // pixels from the end within which the log follows the text

export class Chat {
  #messages = [];
  #pendingCalls = []; // tool calls whose results are to be typed in
  #abort = null;
  #keyRefused;

  constructor(keyRefused) {
    this.#keyRefused = keyRefused;
    byId("composer").addEventListener("submit", (event) => this.#submitted(event));
    byId("message").addEventListener("keydown", (event) => this.#keyed(event));
    byId("stop").addEventListener("click", () => this.#abort?.abort());
    byId("new-chat").addEventListener("click", () => this.#restart());
    byId("settings").addEventListener("submit", (event) => event.preventDefault());
    // What is wrong must be in sight to be pointed at.
    byId("settings").addEventListener("invalid", () => (byId("more-settings").open = true), true);
    for (const button of document.querySelectorAll(".sample")) {
      button.addEventListener("click", () => this.#say(button.textContent));
    }
  }

  #keyed(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      byId("composer").requestSubmit();
    }
  }

  #submitted(event) {
    event.preventDefault();
    const text = byId("message").value;
    if (text.trim() && !this.#abort && byId("settings").reportValidity()) this.#say(text);
  }

  #say(text) {
    if (this.#abort) return;
    byId("message").value = "";
    const pending = this.#pendingCalls.shift();
    const message = pending
      ? { role: "tool", tool_call_id: pending.id, content: text }
      : { role: "user", content: text };
    this.#messages.push(message);
    const turn = element("article", `turn ${message.role}`);
    turn.append(element("h3", "who", pending ? `Result of ${pending.function.name}` : "You"));
    turn.append(element("p", "text", text));
    this.#append(turn);
    this.#nameComposer();
    if (!this.#pendingCalls.length) this.#ask(message);
  }

  async #ask(message) {
    const answer = new Answer(byId("model").value || "Model");
    this.#append(answer.node);
    const abort = new AbortController();
    this.#setBusy(abort);
    let problem = "";
    try {
      const body = requestOf(this.#messages);
      const response = await call("/v1/chat/completions", { body, signal: abort.signal });
      for await (const event of events(response)) this.#following(() => answer.push(event));
    } catch (error) {
      problem = this.#sentenceOf(error);
    }
    if (this.#abort !== abort) return; // a new chat has begun
    this.#following(() => answer.end(problem));
    this.#setBusy(null);
    this.#keep(answer, message, problem);
  }

  #sentenceOf(error) {
    if (wasEnded(error)) return STOPPED;
    if (error.status === 401) this.#keyRefused();
    if (!(error instanceof ApiFailure || error instanceof SettingsError)) reportError(error);
    return error.message;
  }

  /** Puts the answer into the conversation, or takes an unanswered message out of it again. */
  #keep(answer, message, problem) {
    if (!answer.isEmpty) {
      this.#messages.push(answer.message);
      if (answer.finishReason === "tool_calls") this.#pendingCalls = answer.message.tool_calls ?? [];
    } else if (problem && message.role === "user") {
      this.#messages.pop();
      byId("message").value ||= message.content;
    }
    this.#nameComposer();
    byId("message").focus();
  }

  #restart() {
    this.#abort?.abort();
    this.#setBusy(null);
    this.#messages = [];
    this.#pendingCalls = [];
    byId("log").replaceChildren(byId("welcome"));
    byId("welcome").hidden = false;
    this.#nameComposer();
    byId("message").focus();
  }

  #nameComposer() {
    const [next] = this.#pendingCalls;
    const name = next ? `Result of ${next.function.name}` : "Message";
    setText("message-label", name);
    byId("message").placeholder = `${name} (Enter sends, Shift+Enter breaks the line)`;
  }

  #setBusy(abort) {
    this.#abort = abort;
    byId("send").hidden = abort !== null;
    byId("stop").hidden = abort === null;
  }

  #append(node) {
    const log = byId("log");
    byId("welcome").hidden = true;
    log.append(node);
    log.scrollTop = log.scrollHeight;
  }

  /** Changes the log and keeps its end in sight if it was. */
  #following(change) {
    const log = byId("log");
    const isNear = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR;
    change();
    if (isNear) log.scrollTop = log.scrollHeight;
  }
}
