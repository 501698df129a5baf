"use strict";

// What a link leads to may be folded; it unfolds with everything that it is in.
(() => {
  const unfold = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    for (let e = target; e; e = e.parentElement) if (e.tagName === "DETAILS") e.open = true;
    if (target) target.scrollIntoView();
  };
  addEventListener("hashchange", unfold);
  unfold();
})();

// A button unfolds all details, as for printing, and folds them again.
(() => {
  const heading = document.querySelector(".details > h2");
  if (!heading) return;
  const all = [...document.querySelectorAll(".details details")];
  const button = document.createElement("button");
  button.type = "button";
  button.className = "unfold";
  const name = () => { button.textContent = all.every((one) => one.open) ? "Fold all" : "Unfold all"; };
  button.addEventListener("click", () => {
    const open = !all.every((one) => one.open);
    for (const one of all) one.open = open;
    name();
  });
  name();
  heading.after(button);
})();

// Tables: a button in each column's heading sorts by that column.
(() => {
  const collator = new Intl.Collator("en", { numeric: true });

  const compare = (a, b) => {
    const [x, y] = [a.dataset.value, b.dataset.value];
    if (x !== undefined && y !== undefined) return Number(x) - Number(y);
    return collator.compare(a.textContent, b.textContent);
  };

  // Whatever the direction, what is not ranked stays below, and so does what has no number where others have one.
  const depth = (row, cell, numeric) =>
    (row.matches(".failed, .unranked") ? 2 : 0) + (numeric && cell.dataset.value === undefined ? 1 : 0);

  const sort = (table, column, direction) => {
    const body = table.tBodies[0];
    const rows = [...body.rows];
    const numeric = rows.some((row) => row.cells[column].dataset.value !== undefined);
    rows.sort((a, b) => {
      const [x, y] = [a.cells[column], b.cells[column]];
      return depth(a, x, numeric) - depth(b, y, numeric) || direction * compare(x, y);
    });
    body.append(...rows);
  };

  for (const table of document.querySelectorAll("table.sortable")) {
    const headings = [...table.tHead.rows[0].cells];
    headings.forEach((heading, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...heading.childNodes);
      button.addEventListener("click", () => {
        const ascending = heading.getAttribute("aria-sort") !== "ascending";
        for (const other of headings) other.removeAttribute("aria-sort");
        heading.setAttribute("aria-sort", ascending ? "ascending" : "descending");
        sort(table, column, ascending ? 1 : -1);
      });
      heading.append(button);
    });
  }
})();
