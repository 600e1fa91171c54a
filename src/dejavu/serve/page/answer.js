// One answer on the page: its text token by token, its figures, its strip.

import { Strip, percent } from "./strip.js";

export class Answer {
  // place: the element to add it to; title: what it is called; shape: the model's.
  constructor(place, title, shape) {
    const template = document.getElementById("answer");
    this.element = template.content.firstElementChild.cloneNode(true);
    place.append(this.element);
    this.element.querySelector("h3").textContent = title;
    this.text = this.element.querySelector(".text");
    const [canvas, detail, layers] = ["canvas", ".detail", ".layers"].map((name) => this.element.querySelector(name));
    this.strip = new Strip(canvas, detail, layers, shape);
    this.tokens = [];
    this.started = performance.now();
    this.densities = [];
    this.text.addEventListener("pointerover", (event) => this.#choose(event.target));
    this.text.addEventListener("click", (event) => this.#choose(event.target));
  }

  get said() {
    return this.tokens.map((token) => token.text).join("");
  }

  add(token) {
    const now = performance.now();
    if (this.tokens.length === 0) {
      this.first = now;
      this.#figure("first", `${Math.round(now - this.started)} ms`);
    } else {
      this.#figure("speed", ((1000 * this.tokens.length) / (now - this.first)).toFixed(0));
    }
    const element = document.createElement("span");
    element.className = "token";
    element.textContent = token.text;
    this.tokens.push({ ...token, element });
    this.text.append(element);
    this.#figure("count", String(this.tokens.length));
    if (token.activity) {
      this.densities.push(mean(token.activity.map((layer) => layer.density)));
      this.#figure("density", percent(mean(this.densities)));
    }
    this.#choose(element);
  }

  // Mark the tokens from the first one on that is not the other's.
  compare(other) {
    const place = this.tokens.findIndex((token, i) => i < other.tokens.length && token.text !== other.tokens[i].text);
    this.tokens.forEach((token, i) => token.element.classList.toggle("differs", place >= 0 && i >= place));
    return place;
  }

  #choose(element) {
    const place = this.tokens.findIndex((token) => token.element === element);
    if (place < 0) return;
    this.text.querySelector(".chosen")?.classList.remove("chosen");
    element.classList.add("chosen");
    this.strip.show(this.tokens[place].activity, `token ${place + 1} (${JSON.stringify(element.textContent)})`);
  }

  #figure(name, value) {
    this.element.querySelector(`[data-figure=${name}]`).textContent = value;
  }
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}
