// Layers x experts, each cell coloured by its tokens over the mean of its layer.

import { colour, redrawn, short, surface, whole } from "./dom.js";

const LEAST_TOP = 2; // the scale ends at twice the mean or higher
const LEAST_LINED = 6; // pixels of a cell
const MARGIN = 26; // the layers' numbers
const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

/** "#rrggbb" -> [r, g, b]. */
function channels(hex) {
  return [1, 3, 5].map((start) => parseInt(hex.slice(start, start + 2), 16));
}

/** The colour at `part` of a scale, 0 to 1. */
function mixed(stops, part) {
  const at = Math.min(part, 1) * (stops.length - 1);
  const low = Math.min(Math.floor(at), stops.length - 2);
  return stops[low].map((value, i) => value + (stops[low + 1][i] - value) * (at - low));
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
    return Math.min(Math.max(this.#counts.length * 22, 88), 200);
  }

  #relative(row, column) {
    const total = this.#totals[row];
    return total ? (this.#counts[row][column] * this.#counts[row].length) / total : 0;
  }

  #draw() {
    const { context, width, height } = surface(this.#canvas);
    if (!this.#counts.length) return;
    const grid = this.#grid(width, height);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.#picture(grid), MARGIN, 0, width - MARGIN, height);
    if (Math.min(grid.cellWidth, grid.cellHeight) >= LEAST_LINED) this.#lines(context, grid, width, height);
    this.#names(context, grid, height);
    if (this.#cell) {
      context.strokeStyle = colour("ink");
      context.lineWidth = 2;
      context.strokeRect(...grid.rectangle(...this.#cell));
    }
  }

  /** One pixel a cell: drawing 60 x 384 rectangles would take a quarter of a second. */
  #picture({ rows, columns }) {
    const values = this.#counts.flatMap((row, i) => row.map((_, j) => this.#relative(i, j)));
    const most = values.reduce((a, b) => Math.max(a, b), LEAST_TOP);
    const stops = [0, 1, 2, 3].map((i) => channels(colour(`heat-${i}`)));
    const image = new ImageData(columns, rows);
    values.forEach((value, i) => image.data.set([...mixed(stops, value / most), 255], 4 * i));
    this.#most(`${short(most)}×`);
    const picture = new OffscreenCanvas(columns, rows);
    picture.getContext("2d").putImageData(image, 0, 0);
    return picture;
  }

  #lines(context, grid, width, height) {
    context.strokeStyle = colour("panel");
    context.lineWidth = 1.5;
    context.beginPath();
    for (let j = 1; j < grid.columns; j += 1) {
      context.moveTo(MARGIN + j * grid.cellWidth, 0);
      context.lineTo(MARGIN + j * grid.cellWidth, height);
    }
    for (let i = 1; i < grid.rows; i += 1) {
      context.moveTo(MARGIN, i * grid.cellHeight);
      context.lineTo(width, i * grid.cellHeight);
    }
    context.stroke();
  }

  #grid(width, height) {
    const [rows, columns] = [this.#counts.length, this.#counts[0].length];
    const [cellWidth, cellHeight] = [(width - MARGIN) / columns, height / rows];
    const rectangle = (i, j) => [MARGIN + j * cellWidth, i * cellHeight, cellWidth, cellHeight];
    return { rows, columns, cellWidth, cellHeight, rectangle };
  }

  #names(context, grid, height) {
    context.fillStyle = colour("soft");
    context.font = "11px ui-monospace, monospace";
    context.textAlign = "right";
    context.textBaseline = "middle";
    const every = Math.ceil(14 / (height / grid.rows));
    for (let i = 0; i < grid.rows; i += every) {
      const middle = Math.max((i + 0.5) * grid.cellHeight, 6); // not cut at the top
      context.fillText(String(this.#firstLayer + i), MARGIN - 8, middle);
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
    const parts = [`layer ${this.#firstLayer + row}`, `expert ${column}`, `${share.toFixed(2)} % of the layer`];
    this.#readout([...parts, `${short(this.#relative(row, column))}× the mean`, `${whole(count)} tokens`].join(" · "));
  }
}
