// Layers x experts, each cell coloured by its tokens over the mean of its layer.

import { colour, redrawn, short, surface, whole } from "./dom.js";

const LEAST_TOP = 2; // the scale ends at twice the mean or higher
const MARGIN = 26; // the layers' numbers
const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

/** "#rrggbb" -> [r, g, b]. */
function channels(hex) {
  return [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
}

function mixed(stops, part) {
  const at = Math.min(part, 1) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2);
  const mix = stops[low].map((value, i) => value + (stops[low + 1][i] - value) * (at - low));
  return `rgb(${mix.map(Math.round).join(" ")})`;
}

export class HeatMap {
  #canvas;
  #readout;
  #most;
  #counts = [];
  #totals = [];
  #firstLayer = 0;
  #cell = null; // [row, column]
  #idle = "";

  /** readout(text): what the cell under the pointer says; most(text): the scale's end. */
  constructor(canvas, readout, most) {
    this.#canvas = canvas;
    this.#readout = readout;
    this.#most = most;
    redrawn(canvas, () => this.#draw());
    canvas.addEventListener("pointermove", (event) => this.#select(this.#cellAt(event.offsetX, event.offsetY)));
    canvas.addEventListener("pointerdown", (event) => this.#select(this.#cellAt(event.offsetX, event.offsetY)));
    canvas.addEventListener("pointerleave", () => this.#select(null));
    canvas.addEventListener("blur", () => this.#select(null));
    canvas.addEventListener("keydown", (event) => this.#move(event));
  }

  /** counts[layer][expert]: tokens; `idle` is the readout while no cell is chosen. */
  show(counts, firstLayer, idle) {
    this.#counts = counts;
    this.#totals = counts.map((row) => row.reduce((sum, count) => sum + count, 0));
    this.#firstLayer = firstLayer;
    this.#idle = idle;
    this.#canvas.parentElement.style.minHeight = `${this.#height()}px`; // takes more where there is room
    this.#draw();
    this.#tell();
  }

  #height() {
    return Math.min(Math.max(this.#counts.length * 22, 88), 240);
  }

  #relative(row, column) {
    const total = this.#totals[row];
    return total ? (this.#counts[row][column] * this.#counts[row].length) / total : 0;
  }

  #draw() {
    const { context, width, height } = surface(this.#canvas);
    if (!this.#counts.length) return;
    const values = this.#counts.map((row, i) => row.map((_, j) => this.#relative(i, j)));
    const most = values.flat().reduce((a, b) => Math.max(a, b), LEAST_TOP);
    this.#most(`${short(most)}×`);
    const stops = [0, 1, 2, 3].map((i) => channels(colour(`heat-${i}`)));
    const grid = this.#grid(width, height);
    values.forEach((row, i) =>
      row.forEach((value, j) => {
        context.fillStyle = mixed(stops, value / most);
        context.fillRect(...grid.rectangle(i, j));
      }),
    );
    this.#names(context, grid, height);
    if (this.#cell) {
      context.strokeStyle = colour("ink");
      context.lineWidth = 2;
      context.strokeRect(...grid.rectangle(...this.#cell));
    }
  }

  #grid(width, height) {
    const [rows, columns] = [this.#counts.length, this.#counts[0].length];
    const [cellWidth, cellHeight] = [(width - MARGIN) / columns, height / rows];
    const gap = Math.min(cellWidth, cellHeight) >= 6 ? 1.5 : 0;
    const rectangle = (i, j) => {
      const [left, top] = [MARGIN + j * cellWidth, i * cellHeight];
      return [left, top, cellWidth - gap, cellHeight - gap];
    };
    return { rows, columns, cellWidth, cellHeight, rectangle };
  }

  #names(context, grid, height) {
    context.fillStyle = colour("soft");
    context.font = "11px ui-monospace, monospace";
    context.textAlign = "right";
    context.textBaseline = "middle";
    const every = Math.ceil(14 / (height / grid.rows));
    for (let i = 0; i < grid.rows; i += every) {
      context.fillText(String(this.#firstLayer + i), MARGIN - 8, (i + 0.5) * grid.cellHeight);
    }
  }

  #cellAt(x, y) {
    if (!this.#counts.length) return null;
    const grid = this.#grid(this.#canvas.clientWidth, this.#canvas.clientHeight);
    const [row, column] = [Math.floor(y / grid.cellHeight), Math.floor((x - MARGIN) / grid.cellWidth)];
    const isInside = row >= 0 && row < grid.rows && column >= 0 && column < grid.columns;
    return isInside ? [row, column] : null;
  }

  #move(event) {
    const step = STEPS[event.key];
    if (!step || !this.#counts.length) return;
    event.preventDefault();
    const [rows, columns] = [this.#counts.length, this.#counts[0].length];
    const [row, column] = this.#cell ?? [0, 0];
    const next = this.#cell ? [row + step[0], column + step[1]] : [0, 0];
    this.#select([Math.min(Math.max(next[0], 0), rows - 1), Math.min(Math.max(next[1], 0), columns - 1)]);
  }

  #select(cell) {
    this.#cell = cell;
    this.#draw();
    this.#tell();
  }

  #tell() {
    if (!this.#cell) {
      this.#readout(this.#idle);
      return;
    }
    const [row, column] = this.#cell;
    const count = this.#counts[row][column];
    const share = (100 * count) / Math.max(this.#totals[row], 1);
    const parts = [`layer ${this.#firstLayer + row}`, `expert ${column}`, `${share.toFixed(2)} % of the layer's tokens`];
    this.#readout([...parts, `${short(this.#relative(row, column))}× the mean`, `${whole(count)} tokens`].join(" · "));
  }
}
