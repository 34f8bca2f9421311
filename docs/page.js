// What pages gain by a script: a search, a copy button, a table of contents that follows, light or dark.
// Without it all of them read the same.
const ROOT = document.documentElement.dataset.root
const tools = document.querySelector(".tools")
const toc = document.querySelector(".toc")

function made(tag, parent, properties) {
  const element = Object.assign(document.createElement(tag), properties)
  parent.append(element)
  return element
}

// Light or dark, as chosen before
const scheme = document.documentElement.style
try { scheme.colorScheme = localStorage.getItem("scheme") || "" } catch { /* not kept */ }

// A Greek letter is found by its sign and by its word, with and without the underscore of an index
const SIGNS = { alpha: "α", beta: "β", gamma: "γ", delta: "δ", epsilon: "ε", theta: "θ", lambda: "λ", sigma: "σ",
  eta: "η", tau: "τ", mu: "μ", nu: "ν", pi: "π" }
const signed = word => word.replace(/_/g, "").replace(RegExp(`^(${Object.keys(SIGNS).join("|")})(?=.{0,3}$)`), name => SIGNS[name])

const escaped = word => word.replace(/[\\^$.*+?()[\]{}|/]/g, "\\$&")

// Search: all words must be in a section. First comes what has them as its heading, then where they begin words, then
// this page's sections, the glossary, and what has most of the words in its heading. Enter opens the first
const input = made("input", tools, { type: "search", placeholder: "Search", ariaLabel: "Search all pages" })
const found = made("div", tools, { className: "found" })
function search() {
  const words = input.value.toLowerCase().split(/\s+/).filter(Boolean), both = words.flatMap(word => [word, signed(word)])
  const has = (text, word) => text.includes(word) || text.includes(signed(word))
  if (typeof SECTIONS === "undefined") return  // search.js calls again when it is there
  const hits = [], patterns = words.map(word => [word, signed(word)].map(of => RegExp(`(?<![\\p{L}\\p{N}])${escaped(of)}`, "u")))
  for (const [title, heading, address, text, also] of words.length ? SECTIONS : []) {
    const heads = [heading || title, ...also], head = `${title} ${heads.join(" ")}`.toLowerCase(), body = text.toLowerCase()
    if (!words.every(word => has(head, word) || has(body, word))) continue
    const exact = heads.some(of => `${of} `.toLowerCase().startsWith(`${words.join(" ")} `))
    const whole = patterns.every(pair => pair.some(pattern => pattern.test(head) || pattern.test(body)))
    const here = new URL(ROOT + address, location.href).pathname === location.pathname
    hits.push([1000 * exact + 200 * whole + 100 * here + 50 * address.startsWith("docs/words.html") + words.filter(word => has(head, word)).length, title, heading, address, text])
  }
  hits.sort((a, b) => b[0] - a[0])
  found.replaceChildren()
  for (const [, title, heading, address, text] of hits.slice(0, 12)) {
    const link = made("a", found, { href: ROOT + address, textContent: heading ? `${title}: ${heading}` : title })
    marked(made("small", link), excerpt(text, both), both)
  }
  if (words.length && !hits.length) found.textContent = "Nothing has all of these words."
}

// Some 140 letters around the first of the words that is there, from word to word
function excerpt(text, words) {
  const at = words.map(word => text.toLowerCase().indexOf(word)).find(place => place >= 0) ?? 0
  const start = at < 50 ? 0 : text.indexOf(" ", at - 40) + 1 || at
  const end = text.length < start + 140 ? text.length : text.lastIndexOf(" ", start + 140)
  return (start ? "… " : "") + text.slice(start, Math.max(end, at)) + (end < text.length ? " …" : "")
}

function marked(parent, text, words) {
  text.split(new RegExp(`(${words.map(escaped).join("|")})`, "i")).forEach((part, i) => {
    if (i % 2) made("mark", parent, { textContent: part })
    else parent.append(part)
  })
}

input.addEventListener("focus", () => made("script", document.head, { src: ROOT + "search.js", onload: search }), { once: true })
input.addEventListener("input", search)
input.addEventListener("focus", search)
document.addEventListener("click", event => { if (!tools.contains(event.target)) found.replaceChildren() })
document.addEventListener("keydown", event => {
  if (event.key === "Escape") { input.value = ""; found.replaceChildren() }
  if (event.key === "Enter" && document.activeElement === input) found.querySelector("a")?.click()
  if (event.key === "/" && document.activeElement.tagName !== "INPUT") { event.preventDefault(); input.focus() }
})

made("button", tools, { textContent: "Light / dark", onclick() {
  const dark = scheme.colorScheme ? scheme.colorScheme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches
  scheme.colorScheme = dark ? "light" : "dark"
  try { localStorage.setItem("scheme", scheme.colorScheme) } catch { /* not kept */ }
} })

// Copy: code without its numbers
for (const block of document.querySelectorAll("pre, .lines .code")) {
  made("button", block, { className: "copy", textContent: "Copy", async onclick() {
    const copy = block.cloneNode(true)
    copy.querySelectorAll(".number, .copy").forEach(element => element.remove())
    await navigator.clipboard.writeText(copy.textContent)
    this.textContent = "Copied"
  } })
}

// Leaderboards: the head of a column sorts by it, the best first; once more turns it round
for (const table of document.querySelectorAll("#leaderboards ~ .wide table")) {
  const heads = [...table.tHead.rows[0].cells]
  heads.at(-1).ariaSort = "descending"
  heads.forEach((head, i) => {
    const words = head.textContent
    head.replaceChildren()
    made("button", head, { className: "sort", textContent: words, onclick() {
      const rows = [...table.tBodies[0].rows], text = row => row.cells[i].textContent, value = row => parseFloat(text(row)) || 0
      const numbers = rows.some(value), first = numbers ? "descending" : "ascending"
      const order = head.ariaSort !== first ? first : numbers ? "ascending" : "descending", sign = order === "ascending" ? 1 : -1
      rows.sort((a, b) => sign * (numbers ? value(a) - value(b) : text(a).localeCompare(text(b))))
      table.tBodies[0].append(...rows)
      heads.forEach(other => { other.ariaSort = other === head ? order : "none" })
    } })
  })
}

// A table of four columns or wider than its place is on a phone a block for each row, in which a cell has the name of
// its column
for (const table of document.querySelectorAll(".wide table:not(.grid)")) {
  if (!table.tHead || (table.tHead.rows[0].cells.length < 4 && table.scrollWidth <= table.parentElement.clientWidth)) continue
  table.classList.add("stacked")
  const names = [...table.tHead.rows[0].cells].map(cell => cell.textContent)
  table.querySelectorAll("tbody td:not(:first-child)").forEach(cell => {
    cell.dataset.column = names[cell.cellIndex]
    cell.classList.toggle("none", cell.textContent.trim() === "-")
  })
}

// A formula that is wider than its column goes above both. What is wider than the page fades at the edge
for (const formula of document.querySelectorAll(".row .math")) {
  if (formula.scrollWidth > formula.clientWidth) formula.closest(".row").classList.add("broad")
}
const boxes = document.querySelectorAll(".math, .wide, .figure")
const fade = () => boxes.forEach(box => box.classList.toggle("more", box.scrollLeft + box.clientWidth < box.scrollWidth - 2))
boxes.forEach(box => box.addEventListener("scroll", fade, { passive: true }))
addEventListener("load", fade)
addEventListener("resize", fade)

// The table of contents: open beside the text, and with the section that is read
if (toc) {
  toc.open = matchMedia("(min-width: 80rem)").matches
  const links = [...toc.querySelectorAll("a")]
  const heads = links.map(link => document.getElementById(link.hash.slice(1)))
  const follow = () => {
    const here = heads.findLastIndex(head => head.getBoundingClientRect().top < 120)
    links.forEach((link, i) => link.classList.toggle("here", i === here))
    if (toc.open && here >= 0 && matchMedia("(min-width: 80rem)").matches) {
      toc.scrollTop = links[here].offsetTop - toc.clientHeight / 2
    }
  }
  addEventListener("scroll", follow, { passive: true })
  follow()
}

// A link into what is folded opens it, and so does the printer
const unfold = element => { for (let e = element; e; e = e.parentElement) if (e.tagName === "DETAILS") e.open = true }
const arrive = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)))
  unfold(target)
  target?.scrollIntoView()
}
if (location.hash) arrive()
addEventListener("hashchange", arrive)
addEventListener("beforeprint", () => document.querySelectorAll("main details").forEach(element => { element.open = true }))
