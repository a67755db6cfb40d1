// What the form above the conversation says, as a request.

import { byId } from "./dom.js";

/** A setting that cannot be sent; the message is one sentence. */
export class SettingsError extends Error {}

function numberOf(id) {
  const text = byId(id).value.trim();
  return text === "" ? undefined : Number(text);
}

function toolsOf(text) {
  if (!text.trim()) return undefined;
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new SettingsError(`The tools in the settings are not JSON (${error.message}).`);
  }
  if (!Array.isArray(tools)) throw new SettingsError("The tools in the settings must be a JSON list.");
  return tools.length ? tools : undefined;
}

/** The body of a streamed chat; fields left empty are not sent, so the model's own defaults hold. */
export function requestOf(messages) {
  const system = byId("system").value.trim();
  const body = {
    model: byId("model").value || undefined,
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    stream: true,
    stream_options: { include_usage: true },
    temperature: numberOf("temperature"),
    max_tokens: numberOf("max-tokens"),
    tools: toolsOf(byId("tools").value),
  };
  // Thinking is the templates' default, and one that knows no such switch would refuse it.
  if (!byId("thinking").checked) body.chat_template_kwargs = { thinking: false };
  return body;
}
