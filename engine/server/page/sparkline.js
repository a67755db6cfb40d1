// A line over the last two minutes, newest at the right.

import { colour, redrawn, surface } from "./dom.js";
import { HISTORY_SECONDS } from "./history.js";

const TOP = 6; // room for the line's own width and the dot

export class Sparkline {
  #canvas;
  #points = [];

  constructor(canvas) {
    this.#canvas = canvas;
    redrawn(canvas, () => this.#draw());
  }

  /** points: [{time, value}], value null where the line breaks. */
  show(points) {
    this.#points = points;
    this.#draw();
  }

  #draw() {
    const { context, width, height } = surface(this.#canvas);
    this.#baseline(context, width, height);
    const newest = this.#points.at(-1)?.time;
    const most = Math.max(...this.#points.map((point) => point.value ?? 0), 1);
    const place = ({ time, value }) => [
      width - TOP - ((newest - time) / 1000 / HISTORY_SECONDS) * (width - TOP),
      height - 1 - (value / most) * (height - TOP - 1),
    ];
    for (const run of runsOf(this.#points)) this.#run(context, run.map(place), height);
    const last = this.#points.at(-1);
    if (last && last.value !== null) dot(context, place(last));
  }

  #baseline(context, width, height) {
    context.strokeStyle = colour("line");
    context.lineWidth = 1;
    context.beginPath();
    for (const y of [0.5, height / 2, height - 0.5]) {
      context.moveTo(0, Math.floor(y) + 0.5);
      context.lineTo(width, Math.floor(y) + 0.5);
    }
    context.stroke();
  }

  #run(context, places, height) {
    context.beginPath();
    places.forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
    context.strokeStyle = colour("flow");
    context.lineWidth = 1.75;
    context.lineJoin = "round";
    context.stroke();
    context.lineTo(places.at(-1)[0], height);
    context.lineTo(places[0][0], height);
    context.globalAlpha = 0.14;
    context.fillStyle = colour("flow");
    context.fill();
    context.globalAlpha = 1;
  }
}

function runsOf(points) {
  const runs = [[]];
  for (const point of points) {
    if (point.value === null) runs.push([]);
    else runs.at(-1).push(point);
  }
  return runs.filter((run) => run.length);
}

function dot(context, [x, y]) {
  context.beginPath();
  context.arc(x, y, 3, 0, 2 * Math.PI);
  context.fillStyle = colour("flow");
  context.fill();
}
