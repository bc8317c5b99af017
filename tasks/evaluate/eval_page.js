"use strict";
const cards = Array.from(document.querySelectorAll("article.question"));
const filter = document.getElementById("category");
const help = document.getElementById("help");
const shown = () => cards.filter((card) => !card.hidden);
let current = -1;

function go(step) {
  const visible = shown();
  if (!visible.length) return;
  const at = visible.indexOf(cards[current]);
  const next = at < 0 ? (step > 0 ? 0 : visible.length - 1)
                      : Math.min(Math.max(at + step, 0), visible.length - 1);
  select(cards.indexOf(visible[next]));
}

function select(index) {
  current = index;
  cards.forEach((card, i) => card.classList.toggle("current", i === index));
  cards[index].focus({preventScroll: true});
  cards[index].scrollIntoView({block: "start"});
}

function applyFilter() {
  cards.forEach((card) => {
    card.hidden = filter.value !== "" && card.dataset.category !== filter.value;
  });
  document.querySelectorAll("nav a[data-category]").forEach((link) => {
    link.hidden = filter.value !== "" && link.dataset.category !== filter.value;
  });
}

function toggleJudgments() {
  const all = Array.from(document.querySelectorAll("details.judgment"));
  const open = !all.every((one) => one.open);
  all.forEach((one) => { one.open = open; });
}

const keys = {
  j: () => go(1), ArrowRight: () => go(1), k: () => go(-1), ArrowLeft: () => go(-1),
  o: toggleJudgments, c: () => filter.focus(), "?": () => { help.hidden = !help.hidden; },
  Escape: () => { help.hidden = true; document.activeElement.blur(); },
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target === filter && event.key !== "Escape") return;
  const act = keys[event.key];
  if (act) { event.preventDefault(); act(); }
});
filter.addEventListener("change", applyFilter);
document.querySelectorAll("nav a[data-index]").forEach((link) => {
  link.addEventListener("click", (event) => {
    event.preventDefault();
    select(Number(link.dataset.index));
  });
});
document.body.dataset.ready = "true";
