// The menu of versions. Without ../versions.js, which docs/versions.py writes, a page shows its own version alone.
"use strict";

(() => {
  const shown = document.querySelector(".versions");
  const versions = window.dualwriteVersions || [];
  const { version, page, top } = shown.dataset;

  // The same page, or the first one of a version that has no such page.
  const place = (one) => `${top}../${one.version}/${one.pages.includes(page) ? page : "index.html"}`;

  if (!versions.some((one) => one.version === version)) return;

  const menu = document.createElement("select");
  menu.setAttribute("aria-label", "Version of the documentation");
  for (const [number, one] of versions.entries()) {
    const words = `Version ${one.version}${number === 0 && versions.length > 1 ? ", the newest" : ""}`;
    menu.add(new Option(words, place(one), one.version === version, one.version === version));
  }
  menu.addEventListener("change", () => { window.location.href = menu.value; });
  shown.replaceChildren(menu);

  if (versions[0].version === version) return;
  document.addEventListener("DOMContentLoaded", () => {
    const note = document.createElement("p");
    note.className = "older-version";
    const link = document.createElement("a");
    link.href = place(versions[0]);
    link.textContent = `the page of version ${versions[0].version}`;
    note.append(`This page is of version ${version}. Read `, link, ".");
    document.querySelector("article").prepend(note);
  });
})();
