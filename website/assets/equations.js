// Typesets the page's equations with KaTeX, which pymdownx.arithmatex has wrapped in \(…\) and \[…\].
for (const element of document.querySelectorAll(".arithmatex")) {
  const text = element.textContent.trim();
  katex.render(text.slice(2, -2), element, { displayMode: text.startsWith("\\["), throwOnError: false });
}
