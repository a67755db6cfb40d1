// Small helpers. Text goes into the page as text nodes alone.

export function byId(id) {
  return document.getElementById(id);
}

export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

/** Sets the text, and leaves the page alone where it stays the same. */
export function setText(id, text) {
  const node = byId(id);
  if (node.textContent !== text) node.textContent = text;
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** The canvas's context in CSS pixels, cleared, with its width and height. */
export function surface(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  const [pixelWidth, pixelHeight] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== pixelWidth) canvas.width = pixelWidth;
  if (canvas.height !== pixelHeight) canvas.height = pixelHeight;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/** Calls `draw` when the canvas changes its size or the colours change. */
export function redrawn(canvas, draw) {
  new ResizeObserver(draw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export function whole(value) {
  return WHOLE.format(value);
}

/** Three digits or so. */
export function short(value) {
  return value >= 100 ? whole(value) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}
