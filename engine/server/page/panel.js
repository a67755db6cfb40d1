// A panel without data says why.

import { byId, element } from "./dom.js";

/** Shows `reason` in place of the panel's content, or the content where the reason is "". */
export function say(id, reason) {
  const panel = byId(id);
  let line = panel.querySelector(".reason");
  if (!line) {
    line = element("p", "reason");
    panel.append(line);
  }
  if (line.textContent !== reason) line.textContent = reason;
  line.hidden = reason === "";
  panel.classList.toggle("empty", reason !== "");
}
