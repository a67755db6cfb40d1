// One answer on the page: thinking folded, text, tool calls, and a line of numbers. Filled from a stream's events.

import { element, short } from "./dom.js";

export const STOPPED = "Stopped.";

export class Answer {
  content = "";
  reasoning = "";
  calls = []; // as the API has them: {id, type, function: {name, arguments}}
  usage = null;
  finishReason = null;
  #nodes = {};
  #started = performance.now();
  #firstToken = null;
  #isTouched = false; // the reader folds as they like

  constructor(name) {
    this.node = element("article", "turn assistant");
    this.node.append(element("h3", "who", name));
    this.node.setAttribute("aria-busy", "true");
  }

  /** Takes one chunk of /v1/chat/completions. */
  push(chunk) {
    this.usage = chunk.usage ?? this.usage;
    for (const { delta, finish_reason } of chunk.choices) {
      this.finishReason = finish_reason ?? this.finishReason;
      const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
      if (reasoning) this.#addReasoning(reasoning);
      if (delta.content) this.#addContent(delta.content);
      for (const call of delta.tool_calls ?? []) this.#addCall(call);
    }
    for (const warning of chunk.warnings ?? []) this.#warn(warning);
  }

  #began() {
    this.#firstToken ??= performance.now();
  }

  #addReasoning(text) {
    this.#began();
    this.reasoning += text;
    if (!this.#nodes.reasoning) this.#openReasoning();
    this.#nodes.reasoning.appendData(text);
  }

  #openReasoning() {
    const details = element("details", "reasoning");
    const summary = element("summary", "", "Thinking");
    const body = element("p", "text");
    this.#nodes.reasoning = body.appendChild(document.createTextNode(""));
    summary.addEventListener("click", () => (this.#isTouched = true));
    details.append(summary, body);
    details.open = true;
    Object.assign(this.#nodes, { details, summary });
    this.node.append(details);
  }

  #foldReasoning() {
    const { details } = this.#nodes;
    if (!details || details.dataset.done) return;
    details.dataset.done = "yes";
    this.#nodes.summary.textContent = "Thought";
    if (!this.#isTouched) details.open = false;
  }

  #addContent(text) {
    this.#began();
    if (!this.#nodes.content) {
      this.#foldReasoning();
      const body = element("p", "text");
      this.#nodes.content = body.appendChild(document.createTextNode(""));
      this.node.append(body);
    }
    this.content += text;
    this.#nodes.content.appendData(text);
  }

  #addCall({ index, id, function: part = {} }) {
    this.#began();
    this.#foldReasoning();
    if (!this.calls[index]) {
      this.calls[index] = { id, type: "function", function: { name: "", arguments: "" }, ...this.#openCall() };
    }
    const call = this.calls[index];
    if (part.name) {
      call.function.name += part.name;
      call.title.textContent = call.function.name;
    }
    if (part.arguments) {
      call.function.arguments += part.arguments;
      call.body.appendData(part.arguments);
    }
  }

  #openCall() {
    const box = element("section", "call");
    const [title, code] = [element("h4"), element("pre")];
    const body = code.appendChild(document.createTextNode(""));
    box.append(title, code);
    box.setAttribute("aria-label", "Tool call");
    this.node.append(box);
    return { title, body };
  }

  #warn(text) {
    this.node.append(element("p", "note", text));
  }

  /** Says how it ended; `problem` is one sentence, or "". */
  end(problem = "") {
    this.node.removeAttribute("aria-busy");
    this.#foldReasoning();
    if (problem) {
      const line = element("p", problem === STOPPED ? "note" : "problem", problem);
      if (problem !== STOPPED) line.setAttribute("role", "alert");
      this.node.append(line);
    }
    const thought = this.usage?.completion_tokens_details?.reasoning_tokens;
    if (thought && this.#nodes.summary) this.#nodes.summary.textContent = `Thought for ${thought} tokens`;
    const numbers = this.#numbers();
    if (numbers) this.node.append(element("p", "note numbers", numbers));
  }

  #numbers() {
    if (!this.usage || this.#firstToken === null) return "";
    const tokens = this.usage.completion_tokens;
    const seconds = (performance.now() - this.#firstToken) / 1000;
    const details = this.usage.completion_tokens_details ?? {};
    const guesses = (details.accepted_prediction_tokens ?? 0) + (details.rejected_prediction_tokens ?? 0);
    const parts = [`${tokens} tokens`, `first after ${Math.round(this.#firstToken - this.#started)} ms`];
    if (tokens > 1 && seconds > 0) parts.push(`${short((tokens - 1) / seconds)} a second`);
    if (guesses) parts.push(`${details.accepted_prediction_tokens} of ${guesses} guesses right`);
    if (this.finishReason === "length") parts.push("cut by the length limit");
    return parts.join(" · ");
  }

  get isEmpty() {
    return !(this.content || this.reasoning || this.calls.length);
  }

  /** The answer as a message of the conversation. */
  get message() {
    const message = { role: "assistant", content: this.content };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    const calls = this.calls.filter(Boolean).map((call) => ({ id: call.id, type: call.type, function: call.function }));
    return calls.length ? { ...message, tool_calls: calls } : message;
  }
}
