const { entries, figures } = JSON.parse(document.getElementById("data").textContent);
const boxes = [...document.querySelectorAll("#runs input")];
const section = document.getElementById("comparison");
const marked = []; // indices of entries, in the order in which they were marked

function cell(row, text, tag = "td") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (tag === "th") made.scope = row.parentElement.tagName === "THEAD" ? "col" : "row";
  row.append(made);
  return made;
}

function written(value, words) {
  const digits = Number(words.match(/\.(\d)/)[1]);
  return words.includes("%") ? `${(100 * value).toFixed(digits)}%` : value.toFixed(digits);
}

// How a figure differs from the first marked entry's, and whether the two intervals are apart.
function difference(found, base, figure) {
  if (!found || !base || found === base || !base.value) return "";
  const change = found.value / base.value - 1;
  const percent = Math.abs(100 * change).toFixed(0);
  const text = percent === "0" ? "the same within 0.5 %" : `${change < 0 ? "−" : "+"}${percent} %`;
  if (found.low === undefined || base.low === undefined) return text;
  if (found.low <= base.high && base.low <= found.high) return `${text}, intervals overlap`;
  if (figure.more_is_better === null) return text;
  return `${text}, ${change > 0 === figure.more_is_better ? "better" : "worse"}`;
}

function draw() {
  section.hidden = marked.length < 2;
  const chosen = marked.map((index) => entries[index]);
  const table = section.querySelector("table");
  table.replaceChildren(document.createElement("thead"), document.createElement("tbody"));
  if (section.hidden) return;
  const head = table.tHead.insertRow();
  cell(head, "", "td");
  for (const entry of chosen) cell(head, `${entry.run}: ${entry.engine}, ${entry.mode}`, "th");
  for (const [key, figure] of Object.entries(figures)) {
    if (!chosen.some((entry) => entry.figures[key])) continue;
    const row = table.tBodies[0].insertRow();
    cell(row, figure.title, "th");
    for (const entry of chosen) {
      const found = entry.figures[key];
      const made = cell(row, found ? written(found.value, figure.words) : "–");
      const note = document.createElement("small");
      note.textContent = difference(found, chosen[0].figures[key], figure);
      made.append(note);
    }
  }
  for (const name of ["verdict", "target", "machine", "date", "commit"]) {
    const row = table.tBodies[0].insertRow();
    cell(row, name, "th");
    for (const entry of chosen) cell(row, entry[name] || "–");
  }
  const others = ["target", "machine"].filter((name) => new Set(chosen.map((entry) => entry[name])).size > 1);
  document.getElementById("caution").textContent =
    others.length ? `Not the same ${others.join(" and ")}: times are not comparable.` : "";
}

for (const box of boxes) {
  box.addEventListener("change", () => {
    if (box.checked) marked.push(Number(box.value));
    else marked.splice(marked.indexOf(Number(box.value)), 1);
    draw();
  });
}
// To begin with: the drafters of the first run that has two.
const drafters = boxes.filter((box) => entries[box.value].verdict && entries[box.value].run === entries[0].run);
for (const box of drafters.slice(0, 2)) {
  box.checked = true;
  marked.push(Number(box.value));
}
draw();
