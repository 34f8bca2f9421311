// Two equations to play with, in two weights: Eq. (8) of FDSE, and line 19 of FedGaLA's Algorithm 1.
// A test compares consensus() with fdse.consensus and unaligned() with fedgala.unaligned. Without a script
// the figures have their words alone.
const inner = (a, b) => a[0] * b[0] + a[1] * b[1]
const length = a => Math.hypot(...a)
const times = (s, a) => [s * a[0], s * a[1]]
const minus = (a, b) => [a[0] - b[0], a[1] - b[1]]
const mixture = (u, points) => points.reduce((m, p, k) => [m[0] + u[k] * p[0], m[1] + u[k] * p[1]], [0, 0])

// The weights u of the shortest mixture: a corner of the hull, the foot of a perpendicular on a side, or 0
function shortest(points) {
  const n = points.length, candidates = []
  const weights = entries => Array.from({ length: n }, (_, k) => entries[k] ?? 0)
  for (let i = 0; i < n; i++) {
    candidates.push(weights({ [i]: 1 }))
    for (let j = 0; j < i; j++) {
      const side = minus(points[j], points[i])
      const share = -inner(points[i], side) / inner(side, side)
      if (share > 0 && share < 1) candidates.push(weights({ [i]: 1 - share, [j]: share }))
    }
  }
  if (n === 3) {
    const turned = points.map(([x, y]) => [-y, x])
    const areas = [0, 1, 2].map(k => inner(turned[(k + 1) % 3], points[(k + 2) % 3]))
    const whole = areas[0] + areas[1] + areas[2]
    if (whole !== 0 && areas.every(area => area / whole >= 0)) candidates.push(areas.map(area => area / whole))
  }
  candidates.sort((u, v) => length(mixture(u, points)) - length(mixture(v, points)))
  return candidates[0]
}

// Eq. (8): clients' updates [[x, y], ...] -> their weights, and the aggregated update
function consensus(delta) {
  const moved = delta.filter(update => length(update) > 0)
  if (!moved.length) return { u: delta.map(() => 0), step: [0, 0] }
  const directions = moved.map(update => times(1 / length(update), update))
  const found = shortest(directions)
  const mean = delta.reduce((total, update) => total + length(update), 0) / delta.length
  return { u: delta.map(update => found[moved.indexOf(update)] ?? 0), step: times(mean, mixture(found, directions)) }
}

const cosine = (a, b) => inner(a, b) / Math.max(length(a) * length(b), 1e-30)

// Line 19: of each layer whether its gradient is discarded
function unaligned(gradients, changes, tau, sign) {
  const of = sign === "descent" ? -1 : 1
  return gradients.map((g, l) => length(changes[l]) > 0 && of * cosine(g, changes[l]) <= tau)
}

// Drawing: y goes up, a point is [x, y]
function shape(parent, tag, attributes = {}) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag)
  for (const name in attributes) element.setAttribute(name, attributes[name])
  return parent.appendChild(element)
}
const put = (element, attributes) => { for (const name in attributes) element.setAttribute(name, attributes[name]) }
const arrow = (element, [x, y], [dx, dy]) => put(element, { x1: x, y1: -y, x2: x + dx, y2: -y - dy })

// A circle at the end of a vector from `origin`, moved by pointer or arrow keys; show() draws again
function handle(svg, vector, origin, name, reach, show) {
  const circle = shape(svg, "circle", { r: 8, tabindex: 0, role: "slider", "aria-label": name })
  const move = (x, y) => {
    vector[0] = Math.max(-reach, Math.min(reach, x))
    vector[1] = Math.max(-reach, Math.min(reach, y))
    show()
  }
  circle.addEventListener("pointerdown", event => circle.setPointerCapture(event.pointerId))
  circle.addEventListener("pointermove", event => {
    if (!circle.hasPointerCapture(event.pointerId)) return
    const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse())
    move(at.x - origin[0], -at.y - origin[1])
  })
  circle.addEventListener("keydown", event => {
    const step = { ArrowLeft: [-5, 0], ArrowRight: [5, 0], ArrowUp: [0, 5], ArrowDown: [0, -5] }[event.key]
    if (!step) return
    event.preventDefault()
    move(vector[0] + step[0], vector[1] + step[1])
  })
  return () => put(circle, { cx: origin[0] + vector[0], cy: -origin[1] - vector[1], "aria-valuenow": Math.round(length(vector)),
    "aria-valuetext": `${vector.map(Math.round).join(", ")}` })
}

function playConsensus(svg, says) {
  put(svg, { viewBox: "-150 -130 300 260" })
  const delta = [[95, 25], [80, -45], [-35, 60]], here = [0, 0], scale = 50
  const hull = shape(svg, "polygon", { class: "hull" }), lines = delta.map(() => shape(svg, "line", { class: "client" }))
  const mean = shape(svg, "line", { class: "mean" }), found = shape(svg, "line", { class: "step" })
  const point = shape(svg, "circle", { r: 4, class: "point" })
  const labels = delta.map((_, k) => Object.assign(shape(svg, "text"), { textContent: `Δθ${k + 1}` }))
  const handles = delta.map((update, k) => handle(svg, update, here, `Update of client ${k + 1}`, 120, show))
  function show() {
    const { u, step } = consensus(delta), plain = mixture([1 / 3, 1 / 3, 1 / 3], delta)
    const directions = delta.map(update => times(scale / (length(update) || 1), update)), shortestPoint = mixture(u, directions)
    put(hull, { points: directions.map(([x, y]) => `${x},${-y}`).join(" ") })
    put(point, { cx: shortestPoint[0], cy: -shortestPoint[1] })
    delta.forEach((update, k) => { arrow(lines[k], here, update); put(labels[k], { x: update[0] + 11, y: -update[1] + 4 }) })
    arrow(mean, here, plain)
    arrow(found, here, step)
    handles.forEach(draw => draw())
    const harmed = way => delta.flatMap((update, k) => inner(update, way) < -1e-9 ? [k + 1] : []).join(" and ")
    const against = way => harmed(way) ? `against client ${harmed(way)}` : "against no client"
    says.textContent = `u = (${u.map(share => share.toFixed(2)).join(", ")}). Eq. (8), thick: length ${length(step).toFixed(0)}, ${against(step)}. ` +
      `Plain mean, dashed: length ${length(plain).toFixed(0)}, ${against(plain)}. The triangle is the hull of the directions, the dot its shortest point.`
  }
  show()
}

function playUnaligned(svg, says) {
  put(svg, { viewBox: "-190 -70 380 140" })
  const origins = [[-125, 0], [0, 0], [125, 0]]
  const gradients = [[35, 25], [-40, 20], [10, -45]], changes = [[45, -10], [30, 35], [-45, 5]]
  const controls = says.parentElement.insertBefore(document.createElement("p"), says)
  controls.innerHTML = `<label>tau <input type="range" min="-1" max="1" step="0.05" value="0"></label>
    <label>sign of line 19 <select><option value="paper">as printed</option><option value="descent">descent</option></select></label>`
  const [tau, sign] = controls.querySelectorAll("input, select"), none = [0, 0]
  const discs = origins.map(([x, y]) => shape(svg, "circle", { cx: x, cy: -y, r: 60, class: "hull" }))
  const lines = origins.map(() => [shape(svg, "line", { class: "client" }), shape(svg, "line", { class: "step" })])
  const handles = origins.flatMap((origin, l) => [handle(svg, changes[l], origin, `Last global change, layer ${l + 1}`, 55, show),
    handle(svg, gradients[l], origin, `Gradient of the batch, layer ${l + 1}`, 55, show)])
  function show() {
    const discarded = unaligned(gradients, changes, +tau.value, sign.value)
    origins.forEach((origin, l) => {
      arrow(lines[l][0], origin, changes[l])
      arrow(lines[l][1], origin, gradients[l])
      for (const element of [discs[l], lines[l][1]]) element.classList.toggle("discarded", discarded[l])
    })
    handles.forEach(draw => draw())
    const words = gradients.map((g, l) => {
      const value = cosine(g, changes[l]), step = value > 0 ? "against" : "along"
      return `layer ${l + 1}: cosine ${value.toFixed(2)}, ${discarded[l] ? "discarded" : `kept, its step goes ${step} the last change`}`
    })
    says.textContent = `tau ${(+tau.value).toFixed(2)}. Thick: the gradient, thin: the last change. ${words.join("; ")}.`
  }
  controls.addEventListener("input", show)
  show()
}

for (const figure of document.querySelectorAll(".play")) {
  const svg = shape(figure, "svg", { role: "group", "aria-label": figure.dataset.name })
  figure.prepend(svg)
  const says = figure.querySelector("figcaption")
  says.setAttribute("aria-live", "polite")
  ;({ consensus: playConsensus, unaligned: playUnaligned })[figure.dataset.play](svg, says)
}
