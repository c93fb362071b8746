// Folds the menu on a phone, and searches the pages. The index is a static file beside this one: no service is asked.
const root = document.currentScript.dataset.root;
const menu = document.getElementById("menu");
const input = document.getElementById("search");
const found = document.getElementById("found");
if (matchMedia("(max-width: 50rem)").matches) menu.open = false;

// A script, and no fetch: browsers fetch nothing for pages of a folder.
function load() {
  if (load.begun) return;
  load.begun = true;
  const script = document.createElement("script");
  script.src = root + "search-index.js";
  script.onload = show;
  document.head.append(script);
}

function show() {
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
  const entries = window.searchIndex || [];
  found.replaceChildren();
  if (!words.length) return;
  const score = ([page, section, , text]) => {
    const [titles, all] = [(page + " " + section).toLowerCase(), text];
    let sum = 0;
    for (const word of words) {
      if (titles.includes(word)) sum += 10;
      else if (all.includes(word)) sum += 1;
      else return 0;
    }
    return sum;
  };
  const best = entries.map((entry) => [score(entry), entry]).filter(([points]) => points);
  best.sort((a, b) => b[0] - a[0]);
  for (const [, [page, section, address]] of best.slice(0, 20)) {
    const [item, link, name] = ["li", "a", "small"].map((tag) => document.createElement(tag));
    link.href = root + address;
    link.textContent = section || page;
    name.textContent = section ? page : "";
    item.append(link, name);
    found.append(item);
  }
  if (!best.length) found.textContent = "nothing found";
}

input.addEventListener("focus", load);
input.addEventListener("input", () => (load(), show()));
