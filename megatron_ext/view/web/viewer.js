// A timeline on a canvas: passes of every rank over time, memory under them.
//
// new Viewer(element, {runs, meanings}) draws runs one above the other on one time axis. A run is
// what view/data.py writes. Drag or arrow keys move; + and -, ctrl and wheel, or two fingers zoom;
// 0 or a double click shows all.
"use strict";

class Viewer {
  constructor(root, data) {
    this.root = root;
    const rows = data.runs.reduce((sum, run) => sum + run.pp, 0);
    this.memory = rows > 8 ? "fullest rank" : "each rank";
    this.hover = null;
    this.pointers = new Map();
    root.classList.add("viewer");
    root.innerHTML = '<div class="bar"><span class="buttons"></span><span class="keys"></span></div>'
      + '<canvas tabindex="0" role="img"></canvas><div class="tip" hidden></div>';
    this.canvas = root.querySelector("canvas");
    this.tip = root.querySelector(".tip");
    this.buttons();
    this.listen();
    this.set(data);
  }

  // Replace what is drawn; `keep` leaves the zoom as it is.
  set(data, keep = false) {
    this.runs = data.runs;
    this.meanings = data.meanings;
    this.end = Math.max(1e-9, ...this.runs.map(run => run.makespan));
    if (!keep || !this.span) this.fit();
    this.clamp();
    this.hover = null;
    this.tip.hidden = true;
    this.legend();
    this.canvas.setAttribute("aria-label", this.runs.map(run => `${run.title}: ${run.facts}`).join("; "));
    this.draw();
  }

  fit() {
    this.from = 0;
    this.span = this.end;
  }

  buttons() {
    const place = this.root.querySelector(".buttons");
    const add = (text, title, run) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = text;
      button.title = title;
      button.setAttribute("aria-label", title);
      button.onclick = run;
      place.append(button);
      return button;
    };
    add("−", "zoom out (key -, or ctrl and wheel)", () => this.zoom(1 / 1.5));
    add("+", "zoom in (key +, or ctrl and wheel)", () => this.zoom(1.5));
    add("fit", "show all (key 0, or a double click)", () => { this.fit(); this.draw(); });
    const kinds = ["each rank", "fullest rank", "hidden"];
    const memory = add(`memory: ${this.memory}`, "whose activation memory is drawn", () => {
      this.memory = kinds[(kinds.indexOf(this.memory) + 1) % kinds.length];
      memory.textContent = `memory: ${this.memory}`;
      this.draw();
    });
  }

  legend() {
    const keys = this.root.querySelector(".keys");
    keys.replaceChildren();
    keys.className = "keys bar";
    const add = (colors, text) => {
      const key = document.createElement("span");
      key.className = "key";
      for (const color of colors) {
        const box = document.createElement("i");
        box.style.background = color;
        key.append(box);
      }
      key.append(text);
      keys.append(key);
    };
    const seen = new Map();
    for (const run of this.runs)
      for (const op of run.ops) {
        const colors = run.colors[op];
        if ((seen.get(op) || []).length < colors.length) seen.set(op, colors);
      }
    for (const [op, colors] of seen) add(colors, this.meanings[op]);
    add(["var(--idle)"], "idle");
    if ([...seen.values()].some(colors => colors.length > 1)) add([], "dark to light: chunk 0 to the last");
  }

  // --- geometry -------------------------------------------------------------------------------

  place() {
    const width = this.root.clientWidth || 960;
    const narrow = width < 600;
    this.left = narrow ? 26 : 58;
    this.right = narrow ? 50 : 58;
    this.width = width;
    this.plot = Math.max(60, width - this.left - this.right);
    const most = Math.max(...this.runs.map(run => run.pp));
    const row = most <= 4 ? 26 : most <= 8 ? 22 : most <= 16 ? 16 : 11;
    let y = 4;
    this.blocks = this.runs.map(run => {
      const lines = narrow ? 2 : 1;
      const block = {run, title: y, lines, rows: y + 4 + 18 * lines, row};
      const lane = run.copies.some(copies => copies.length) ? Math.round(row * 0.4) : 0;
      block.lane = lane;
      block.step = row + lane + 3;
      y = block.rows + block.step * run.pp + 6;
      block.strip = this.memory === "each rank" ? Math.max(9, Math.round(row * 0.7)) : 44;
      block.ranks = this.memory === "hidden" ? [] : this.memory === "each rank"
        ? run.peaks.map((_, rank) => rank) : [run.peaks.indexOf(Math.max(...run.peaks))];
      if (block.ranks.length) {
        block.memory = y + 18;
        y = block.memory + (block.strip + 3) * block.ranks.length + 8;
      }
      return block;
    });
    this.axis = y;
    this.height = y + 24;
  }

  x(time) {
    return this.left + this.plot * (time - this.from) / this.span;
  }

  time(x) {
    return this.from + this.span * (x - this.left) / this.plot;
  }

  clamp() {
    this.span = Math.min(this.end, Math.max(this.end / 2000, this.span));
    this.from = Math.max(0, Math.min(this.end - this.span, this.from));
  }

  zoom(factor, x = this.left + this.plot / 2) {
    const at = this.time(x);
    this.span = Math.min(this.end, Math.max(this.end / 2000, this.span / factor));
    this.from = at - this.span * (x - this.left) / this.plot;
    this.clamp();
    this.draw();
  }

  pan(pixels) {
    this.from -= pixels * this.span / this.plot;
    this.clamp();
    this.draw();
  }

  // --- drawing --------------------------------------------------------------------------------

  draw() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.paint(); });
  }

  paint() {
    this.place();
    const ratio = window.devicePixelRatio || 1, canvas = this.canvas;
    canvas.width = Math.round(this.width * ratio);
    canvas.height = Math.round(this.height * ratio);
    canvas.style.height = `${this.height}px`;
    const pen = canvas.getContext("2d"), style = getComputedStyle(this.root);
    this.color = name => style.getPropertyValue(`--${name}`).trim();
    this.face = style.fontFamily;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.fillStyle = this.color("ground");
    pen.fillRect(0, 0, this.width, this.height);
    pen.textBaseline = "middle";
    pen.save();
    pen.beginPath();
    pen.rect(this.left, 0, this.plot, this.height);
    pen.clip();
    for (const block of this.blocks) {
      this.paintRows(pen, block);
      this.paintMemory(pen, block);
    }
    pen.restore();
    for (const block of this.blocks) this.paintLabels(pen, block);
    this.paintAxis(pen);
    this.paintCursor(pen);
  }

  text(pen, text, x, y, size, color, align = "left", weight = "") {
    pen.font = `${weight} ${size}px ${this.face}`;
    pen.fillStyle = color;
    pen.textAlign = align;
    pen.fillText(text, x, y);
  }

  paintRows(pen, block) {
    const {run, row} = block, until = this.from + this.span;
    const names = run.units || [];
    const digits = Math.max(String(Math.max(1, run.microbatches - 1)).length, ...names.map((n) => n.length));
    const micro = this.hover && this.hover.microbatch;
    for (let rank = 0; rank < run.pp; rank++) {
      const y = block.rows + rank * block.step, passes = run.rows[rank];
      pen.fillStyle = this.color("idle");
      pen.fillRect(this.x(0), y, this.plot * run.makespan / this.span, row);
      for (let i = this.first(passes, this.from); i < passes.length; i++) {
        const pass = passes[i];
        if (pass[0] > until) break;
        const parts = (pass.length - 2) / 3, high = row / parts;
        const x = this.x(pass[0]), wide = Math.max(this.x(pass[1]) - x, 0.4);
        const inset = wide > 4 ? 0.5 : 0;
        for (let part = 0; part < parts; part++) {
          const [op, stage, microbatch] = pass.slice(2 + 3 * part, 5 + 3 * part);
          const chunk = run.chunk[stage], top = y + part * high;
          pen.globalAlpha = micro === null || micro === undefined || micro === microbatch ? 1 : 0.35;
          pen.fillStyle = run.colors[op][chunk];
          pen.fillRect(x + inset, top, wide - 2 * inset, high - (parts > 1 ? 0.5 : 0));
          this.number(pen, names.length ? names[microbatch] : microbatch, digits, x, wide, top, high, chunk);
        }
      }
      pen.globalAlpha = 1;
      if (block.lane) this.paintCopies(pen, run, run.copies[rank], y + row, block.lane);
    }
  }

  // A pass's microbatch, if a number of `digits` fits: passes of one length have all a number or none.
  number(pen, microbatch, digits, x, wide, y, high, chunk) {
    const text = String(microbatch), size = Math.min(high * 0.58, 13, (wide - 1) / (0.6 * digits));
    if (size < 5.8) return;
    // The number stays in sight as long as its pass is.
    const from = Math.max(x, this.left), to = Math.min(x + wide, this.left + this.plot);
    if (to - from < 0.6 * size * text.length) return;
    this.text(pen, text, (from + to) / 2, y + high / 2 + 0.5, size, chunk ? "#16202a" : "#ffffff", "center");
  }

  paintCopies(pen, run, copies, y, lane) {
    for (const [start, end, op] of copies) {
      const x = this.x(start);
      pen.fillStyle = run.colors[op][0];
      pen.fillRect(x, y + (op === "RELOAD" ? lane / 2 : 0), Math.max(this.x(end) - x, 0.4), lane / 2);
    }
  }

  paintMemory(pen, block) {
    const {run, strip} = block;
    const top = Math.max(run.reference, ...run.peaks) * 1.1 || 1;
    block.ranks.forEach((rank, i) => {
      const y = block.memory + i * (strip + 3), floor = y + strip;
      pen.fillStyle = this.color("panel");
      pen.fillRect(this.left, y, this.plot, strip);
      pen.beginPath();
      pen.moveTo(this.x(0), floor);
      let level = floor;
      for (const [time, held] of run.memory[rank]) {
        pen.lineTo(this.x(time), level);
        level = floor - strip * held / top;
        pen.lineTo(this.x(time), level);
      }
      pen.lineTo(this.x(run.makespan), level);
      pen.lineTo(this.x(run.makespan), floor);
      pen.fillStyle = this.color("area");
      pen.fill();
      pen.strokeStyle = this.color(run.label === "measured" ? "measured" : "curve");
      pen.lineWidth = 1;
      pen.stroke();
      const line = floor - strip * run.reference / top;
      pen.setLineDash([5, 3]);
      pen.strokeStyle = this.color("ink");
      pen.beginPath();
      pen.moveTo(this.left, line);
      pen.lineTo(this.left + this.plot, line);
      pen.stroke();
      pen.setLineDash([]);
    });
  }

  paintLabels(pen, block) {
    const {run} = block, narrow = block.lines > 1;
    const ink = this.color("ink"), soft = this.color("soft"), end = this.width - 4;
    this.text(pen, run.title, this.left, block.title + 9, 14, ink, "left", "bold");
    const after = narrow ? this.left : this.left + pen.measureText(run.title).width + 12;
    this.text(pen, narrow ? run.brief : run.facts, after, block.title + (narrow ? 27 : 9), narrow ? 11 : 12, soft);
    const size = Math.min(12, block.row * 0.8), name = rank => narrow ? `${rank}` : `rank ${rank}`;
    run.idle.forEach((idle, rank) => {
      const y = block.rows + rank * block.step + block.row / 2;
      this.text(pen, name(rank), this.left - 6, y, size, ink, "right");
      this.text(pen, `${(100 * idle).toFixed(1)} %`, end, y, size, soft, "right");
    });
    if (!block.ranks.length) return;
    const note = narrow ? "activations, in microbatches; dashed: 1F1B's peak"
      : `activations of ${this.memory === "each rank" ? "each rank" : "the fullest rank"}, in microbatches `
        + `(dashed: the peak of 1F1B, ${run.reference}); peak at the right`;
    this.text(pen, note, this.left, block.memory - 9, 11, soft);
    block.ranks.forEach((rank, i) => {
      const y = block.memory + i * (block.strip + 3) + block.strip / 2, font = Math.min(12, block.strip * 0.95);
      this.text(pen, name(rank), this.left - 6, y, font, ink, "right");
      this.text(pen, shortened(run.peaks[rank]), end, y, font, ink, "right", "bold");
    });
  }

  paintAxis(pen) {
    const step = tick(this.span * 60 / this.plot), soft = this.color("soft"), y = this.axis;
    pen.strokeStyle = soft;
    pen.lineWidth = 1;
    pen.beginPath();
    pen.moveTo(this.left, y + 0.5);
    pen.lineTo(this.left + this.plot, y + 0.5);
    for (let i = Math.ceil(this.from / step - 1e-9); i * step <= this.from + this.span + 1e-9; i++) {
      const x = this.x(i * step);
      pen.moveTo(x, y);
      pen.lineTo(x, y + 4);
      this.text(pen, shortened(i * step), x, y + 12, 11, soft, "center");
    }
    pen.stroke();
    this.text(pen, this.runs[0].unit || "time", this.width - 4, y + 12, 11, soft, "right");
  }

  paintCursor(pen) {
    if (!this.hover) return;
    pen.strokeStyle = this.color("soft");
    pen.lineWidth = 1;
    pen.setLineDash([2, 2]);
    pen.beginPath();
    pen.moveTo(Math.round(this.hover.x) + 0.5, 0);
    pen.lineTo(Math.round(this.hover.x) + 0.5, this.axis);
    pen.stroke();
    pen.setLineDash([]);
  }

  // Index of the first pass that ends after `time`.
  first(passes, time) {
    let low = 0, high = passes.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (passes[middle][1] > time) high = middle; else low = middle + 1;
    }
    return low;
  }

  // --- pointing -------------------------------------------------------------------------------

  // What lies at a point of the canvas: {x, microbatch, text}, null outside of the plot.
  at(x, y) {
    if (x < this.left || x > this.left + this.plot) return null;
    const time = this.time(x);
    for (const {run, rows, row, step, memory, strip, ranks} of this.blocks) {
      const unit = run.unit ? ` ${run.unit}` : "";
      const rank = Math.floor((y - rows) / step);
      if (rank >= 0 && rank < run.pp && y >= rows) {
        const pass = run.rows[rank][this.first(run.rows[rank], time)];
        const held = `rank ${rank} holds ${shortened(heldAt(run.memory[rank], time))} microbatches`;
        const down = y - rows - rank * step;
        if (!pass || pass[0] > time || down > row)
          return {x, microbatch: null, text: `rank ${rank}, time ${shortened(time)}${unit}\n${held}`};
        const parts = (pass.length - 2) / 3, part = Math.min(parts - 1, Math.floor(parts * down / row));
        const [op, stage, microbatch] = pass.slice(2 + 3 * part, 5 + 3 * part);
        const chunk = run.chunks > 1 ? `, chunk ${run.chunk[stage]}` : "";
        const where = stage < run.chunk.length ? `stage ${stage}${chunk}` : "";
        const name = (run.units || []).length ? run.units[microbatch] : microbatch;
        return {x, microbatch, text: `${this.meanings[op]}, microbatch ${name}\n`
          + `${where}, rank ${rank}\n${shortened(pass[0])} to ${shortened(pass[1])}${unit}\n${held}`};
      }
      const i = memory ? Math.floor((y - memory) / (strip + 3)) : -1;
      if (i >= 0 && i < ranks.length)
        return {x, microbatch: null, text: `rank ${ranks[i]}, time ${shortened(time)}${unit}\n`
          + `${shortened(heldAt(run.memory[ranks[i]], time))} microbatches of activations`};
    }
    return null;
  }

  point(x, y) {
    this.hover = this.at(x, y);
    this.tip.hidden = !this.hover;
    if (this.hover) {
      this.tip.textContent = this.hover.text;
      const top = this.canvas.offsetTop + y, wide = this.tip.offsetWidth, high = this.tip.offsetHeight;
      this.tip.style.left = `${Math.max(0, Math.min(this.width - wide, x + 14))}px`;
      this.tip.style.top = `${top + 18 + high > this.canvas.offsetTop + this.height ? top - high - 10 : top + 18}px`;
    }
    this.draw();
  }

  listen() {
    const canvas = this.canvas, spot = event => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    canvas.addEventListener("pointerdown", event => {
      canvas.setPointerCapture(event.pointerId);
      this.pointers.set(event.pointerId, spot(event));
    });
    canvas.addEventListener("pointermove", event => {
      const before = this.pointers.get(event.pointerId), now = spot(event);
      if (!before) return this.point(...now);
      const other = [...this.pointers].find(([id]) => id !== event.pointerId);
      this.pointers.set(event.pointerId, now);
      if (other) {  // two fingers: what they hold stays under them
        const apart = Math.abs(before[0] - other[1][0]), then = Math.abs(now[0] - other[1][0]);
        if (apart > 8 && then > 8) this.zoom(then / apart, (now[0] + other[1][0]) / 2);
      } else {
        canvas.classList.add("dragging");
        this.tip.hidden = true;
        this.hover = null;
        this.pan(now[0] - before[0]);
      }
    });
    const release = event => {
      this.pointers.delete(event.pointerId);
      canvas.classList.remove("dragging");
      if (event.type === "pointerup") this.point(...spot(event));
    };
    for (const kind of ["pointerup", "pointercancel"]) canvas.addEventListener(kind, release);
    canvas.addEventListener("pointerleave", () => {
      this.hover = null;
      this.tip.hidden = true;
      this.draw();
    });
    canvas.addEventListener("dblclick", () => { this.fit(); this.draw(); });
    canvas.addEventListener("wheel", event => {
      if (event.ctrlKey || event.metaKey) this.zoom(event.deltaY < 0 ? 1.2 : 1 / 1.2, spot(event)[0]);
      else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) this.pan(-event.deltaX);
      else return;
      event.preventDefault();
    }, {passive: false});
    canvas.addEventListener("keydown", event => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const keys = {
        "+": () => this.zoom(1.5), "=": () => this.zoom(1.5), "-": () => this.zoom(1 / 1.5),
        "0": () => { this.fit(); this.draw(); }, "ArrowLeft": () => this.pan(this.plot / 8),
        "ArrowRight": () => this.pan(-this.plot / 8),
      };
      if (!keys[event.key]) return;
      event.preventDefault();
      keys[event.key]();
    });
    new ResizeObserver(() => { if (this.root.clientWidth !== this.width) this.draw(); }).observe(this.root);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }
}

// A step of 1, 2 or 5 times a power of ten, at least `least`.
function tick(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map(k => k * power).find(step => step >= least * 0.999);
}

function shortened(value) {
  return String(Math.round(value * 1000) / 1000);
}

// Microbatches that a rank holds at a time, from steps [time, microbatches from then on].
function heldAt(steps, time) {
  let held = 0;
  for (const [from, now] of steps) {
    if (from > time) break;
    held = now;
  }
  return held;
}
