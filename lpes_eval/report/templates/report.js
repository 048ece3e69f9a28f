"use strict";
(() => {
  const list = document.getElementById("list");
  if (!list) return;
  const form = document.querySelector("form"), more = document.getElementById("more"), PAGE = 50;
  let data, found = [], shown = 0;

  // Text from samples only ever becomes a text node.
  const make = (name, attributes, ...children) => {
    const element = Object.assign(document.createElement(name), attributes);
    element.append(...children);
    return element;
  };
  const segment = (kind, label, text) =>
    make("div", {className: `segment ${kind}`}, make("span", {className: "kind"}, label), text.replace(/^\n+|\s+$/g, ""));

  function prompt(sample) {
    const box = make("div", {className: "prompt"});
    if (!sample.prompt.length) box.append(make("p", {className: "note"}, "The prompt was left out to keep the page small."));
    for (const [kind, first, count] of sample.prompt) {
      const name = data.kinds[kind], texts = data.texts.slice(first, first + count), text = texts.join("");
      if (name === "context" || name === "prompt") {
        const label = name === "prompt" ? "prompt" : count === 1 ? "1 other item" : `${count} other items`;
        const folded = make("details", {}, make("summary", {}, `${label}, ${text.length.toLocaleString("en")} characters`));
        folded.append(segment(name, label, text));
        box.append(folded);
      } else {
        box.append(segment(name, name === "gold" && sample.position ? `gold, at ${sample.position}` : name, text));
      }
    }
    return box;
  }

  function open(details, sample) {
    if (details.childElementCount > 1) return;
    const [before, after] = sample.pair.split(" → ");
    const answer = (name, text) => make("div", {}, make("b", {}, name), text);
    details.append(make("div", {className: "answers"},
      answer(`${before}, score ${+sample.scores[0].toFixed(3)}`, sample.answers[0]),
      answer(`${after}, score ${+sample.scores[1].toFixed(3)}`, sample.answers[1]),
      answer("expected", sample.expected)), prompt(sample));
  }

  function row(sample) {
    const flip = make("span", {className: sample.better ? "better" : "worse"}, sample.better ? "▲ better" : "▼ worse");
    const where = make("span", {className: "where"}, [sample.task, sample.position].filter(Boolean).join(", "));
    const details = make("details", {}, make("summary", {}, flip, where, make("span", {}, sample.question.slice(-160))));
    details.addEventListener("toggle", () => open(details, sample));
    return make("li", {}, details);
  }

  function show() {
    list.append(...found.slice(shown, shown + PAGE).map(row));
    shown = Math.min(shown + PAGE, found.length);
    more.hidden = shown >= found.length;
  }

  function filter() {
    const wanted = Object.fromEntries(new FormData(form)), text = wanted.text.trim().toLowerCase();
    found = data.samples.filter(s =>
      (!wanted.pair || s.pair === wanted.pair) && (!wanted.task || s.task === wanted.task) &&
      (!wanted.position || s.position === wanted.position) && (!wanted.flip || s.better === (wanted.flip === "better")) &&
      (!text || `${s.question}\n${s.expected}\n${s.answers.join("\n")}`.toLowerCase().includes(text)));
    const better = found.filter(s => s.better).length;
    document.getElementById("count").textContent =
      `${found.length} of ${data.samples.length}: ${better} better, ${found.length - better} worse`;
    list.replaceChildren();
    shown = 0;
    show();
  }

  setTimeout(() => {  // after the first paint
    data = JSON.parse(document.getElementById("data").textContent);
    for (const name of ["pair", "task", "position"]) {
      const values = [...new Set(data.samples.map(s => s[name]))].filter(Boolean);
      if (name === "position") values.sort((a, b) => parseFloat(a) - parseFloat(b));
      form[name].append(make("option", {value: ""}, "all"), ...values.map(value => make("option", {value}, value)));
      form[name].parentNode.hidden = values.length < 2;
    }
    form.addEventListener("input", filter);
    form.addEventListener("submit", event => event.preventDefault());
    more.addEventListener("click", show);
    filter();
  });
})();
