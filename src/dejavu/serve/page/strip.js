// The heat strip: a row a layer, a cell for each block of neurons, and one for each group of heads.

const GAP = 1; // empty cells between neurons and heads

export class Strip {
  // canvas: to draw on; detail: where words go; layers: for one meter a layer.
  constructor(canvas, detail, layers, shape) {
    this.canvas = canvas;
    this.detail = detail;
    this.layers = layers;
    this.shape = shape;
    this.shown = null;
    this.cell = { layer: 0, column: 0 };
    canvas.width = shape.blocks + GAP + shape.heads;
    canvas.height = shape.layers;
    canvas.style.height = `${Math.min(16 * shape.layers, 260)}px`;
    this.meters = Array.from({ length: shape.layers }, (_, layer) => this.#meter(layer));
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("keydown", (event) => this.#move(event));
  }

  // activity: what the API tells of one token, or null for one that was computed dense.
  show(activity, title) {
    const full = { neurons: Array(this.shape.blocks).fill(100), density: 1, heads: Array(this.shape.heads).fill(1) };
    this.shown = activity ?? Array(this.shape.layers).fill(full);
    this.title = activity ? title : `${title}: computed dense`;
    const draw = this.canvas.getContext("2d");
    const { red, green, blue } = accent(this.canvas);
    const image = draw.createImageData(this.canvas.width, this.canvas.height);
    this.shown.forEach((layer, row) => {
      const cells = [...layer.neurons.map((percent) => Math.sqrt(percent / 100)), ...Array(GAP).fill(0), ...layer.heads];
      cells.forEach((strength, column) => {
        image.data.set([red, green, blue, Math.round(255 * strength)], 4 * (row * this.canvas.width + column));
      });
      this.meters[row].value = layer.density;
      this.meters[row].previousSibling.textContent = `layer ${row + 1}: ${percent(layer.density)}`;
    });
    draw.putImageData(image, 0, 0);
    const mean = this.shown.reduce((sum, layer) => sum + layer.density, 0) / this.shown.length;
    this.canvas.setAttribute("aria-label", `${this.title}: ${percent(mean)} of the neurons. Arrow keys tell single cells.`);
    this.#tell();
  }

  #meter(layer) {
    const label = document.createElement("label");
    const meter = document.createElement("meter");
    meter.max = 1;
    label.append(`layer ${layer + 1}: -`, meter);
    this.layers.append(label);
    return meter;
  }

  #point(event) {
    const box = this.canvas.getBoundingClientRect();
    this.cell = {
      column: clamp(Math.floor(((event.clientX - box.left) / box.width) * this.canvas.width), this.canvas.width),
      layer: clamp(Math.floor(((event.clientY - box.top) / box.height) * this.canvas.height), this.canvas.height),
    };
    this.#tell();
  }

  #move(event) {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    this.cell = {
      column: clamp(this.cell.column + step[0], this.canvas.width),
      layer: clamp(this.cell.layer + step[1], this.canvas.height),
    };
    this.#tell();
  }

  #tell() {
    if (!this.shown) return;
    const { layer, column } = this.cell;
    const found = this.shown[layer];
    const block = Math.ceil(this.shape.neurons / this.shape.blocks);
    const head = column - this.shape.blocks - GAP;
    let what = "";
    if (column < this.shape.blocks) {
      const last = Math.min((column + 1) * block, this.shape.neurons) - 1;
      what = `neurons ${column * block} to ${last}: ${found.neurons[column]} % used`;
    } else if (head >= 0) {
      what = `head ${head}: ${found.heads[head] ? "computed" : "skipped"}`;
    }
    this.detail.textContent = `${this.title}; layer ${layer + 1}, ${what}`;
  }
}

export function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}

function clamp(value, size) {
  return Math.max(0, Math.min(size - 1, value));
}

function accent(element) {
  const probe = document.createElement("canvas").getContext("2d");
  probe.fillStyle = getComputedStyle(element.closest("main").querySelector("button[type=submit]")).backgroundColor;
  probe.fillRect(0, 0, 1, 1);
  const [red, green, blue] = probe.getImageData(0, 0, 1, 1).data;
  return { red, green, blue };
}
