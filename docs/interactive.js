// Four equations to play with: Eqs. (8) and (9) of FDSE and line 19 of FedGaLA's Algorithm 1 in two weights,
// the two terms of FedSR's Eq. (9) in one dimension of z. A test compares consensus(), personalize(),
// unaligned() and simplicity() with the functions of fdse.py, fedgala.py and fedsr.py. Without a script the
// figures have their words alone.
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

// Eq. (9): clients' theta_v [[x, y], ...] and tau -> the attention (row k is for client k), and the next theta_v
function personalize(theta, tau) {
  const attention = theta.map(query => {
    const logits = theta.map(key => inner(query, key) / (Math.max(length(query), 1e-12) * Math.max(length(key), 1e-12)) / tau)
    const highest = Math.max(...logits), shares = logits.map(logit => Math.exp(logit - highest))
    const sum = shares.reduce((total, share) => total + share)
    return shares.map(share => share / sum)
  })
  return { attention, next: attention.map(row => mixture(row, theta)) }
}

// L2R, CMI and their weighted sum for p(z|x) = N(mu, sigma^2) and r(z|y) = N(muY, sigmaY^2); `best` has the mu and
// the sigma at which the sum is least
function simplicity([mu, sigma], [muY, sigmaY], alphaL2r, alphaCmi) {
  const l2r = mu ** 2 + sigma ** 2
  const cmi = Math.log(sigmaY / sigma) + (sigma ** 2 + (mu - muY) ** 2) / (2 * sigmaY ** 2) - 0.5
  const pull = 2 * alphaL2r + alphaCmi / sigmaY ** 2
  const best = pull > 0 ? [alphaCmi * muY / sigmaY ** 2 / pull, Math.sqrt(alphaCmi / pull)] : [mu, sigma]
  return { l2r, cmi, sum: alphaL2r * l2r + alphaCmi * cmi, best }
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
      `Plain mean, dashed: length ${length(plain).toFixed(0)}, ${against(plain)}. The triangle is the hull of the directions, the dot its shortest point. Drag a black dot.`
  }
  show()
}

function playUnaligned(svg, says) {
  put(svg, { viewBox: "-190 -70 380 140" })
  const origins = [[-125, 0], [0, 0], [125, 0]]
  const gradients = [[35, 25], [-40, 20], [10, -45]], changes = [[45, -10], [30, 35], [-45, 5]]
  const [tau, sign] = controls(says, `<label>tau <input type="range" min="-1" max="1" step="0.05" value="0"></label>
    <label>sign of line 19 <select><option value="paper">as printed</option><option value="descent">descent</option></select></label>`, show)
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
    says.textContent = `τ ${(+tau.value).toFixed(2)}. Thick: the gradient, thin: the last change. ${words.join("; ")}. Drag a black dot, or τ.`
  }
  show()
}

// Controls above the words of a figure; show() draws again
function controls(says, html, show) {
  const line = says.parentElement.insertBefore(document.createElement("p"), says)
  line.innerHTML = html
  line.addEventListener("input", show)
  return line.querySelectorAll("input, select")
}

function playPersonalize(svg, says) {
  put(svg, { viewBox: "-130 -110 380 220" })
  const theta = [[95, 25], [88, 48], [20, 90]], here = [0, 0], size = 36, left = 135, top = -60
  const [slider] = controls(says, `<label>tau <input type="range" min="-3" max="1" step="0.1" value="-1"></label>`, show)
  const lines = theta.map(() => shape(svg, "line", { class: "client" }))
  const dots = theta.map(() => shape(svg, "circle", { r: 5, class: "point" }))
  const label = (words, x, y) => Object.assign(shape(svg, "text", { x, y }), { textContent: words })
  label("attention", left, top - 22)
  const cells = theta.map((_, k) => theta.map((_, j) => {
    const x = left + j * size, y = top + k * size
    if (!k) label(j + 1, x + size / 2 - 4, top - 6)
    if (!j) label(k + 1, left - 14, y + size / 2 + 5)
    return [shape(svg, "rect", { x, y, width: size, height: size, class: "cell" }), label("", x + 4, y + size / 2 + 5)]
  }))
  const names = theta.map((_, k) => label(`θ${k + 1}`, 0, 0))
  const handles = theta.map((vector, k) => handle(svg, vector, here, `DSE module of client ${k + 1}`, 100, show))
  function show() {
    const tau = 10 ** slider.value, { attention, next } = personalize(theta, tau)
    theta.forEach((vector, k) => {
      arrow(lines[k], here, vector)
      put(names[k], { x: vector[0] + 11, y: -vector[1] + 4 })
      put(dots[k], { cx: next[k][0], cy: -next[k][1] })
      attention[k].forEach((share, j) => {
        put(cells[k][j][0], { "fill-opacity": share * 0.6 })
        cells[k][j][1].textContent = share.toFixed(2)
      })
    })
    handles.forEach(draw => draw())
    const nearest = cosine(theta[0], theta[1]), own = attention.map((row, k) => row[k].toFixed(2)).join(", ")
    slider.ariaValueText = tau.toPrecision(2)
    says.textContent = `τ ${tau.toPrecision(2)}. Row k: how much of each client's θ client k gets; its own share is ${own} (a plain mean: 0.33). ` +
      `Dots: the next θ. Cosine of clients 1 and 2: ${nearest.toFixed(4)}. Drag a black dot, or τ: between the modules of trained layers ` +
      "the cosine is 0.9997 and more, and then no τ above 0.001 tells the clients apart."
  }
  show()
}

function playSimplicity(svg, says) {
  put(svg, { viewBox: "-170 -140 340 160" })
  const unit = 40, here = [0, 0], p = [1.5 * unit, 0.5 * unit], r = [0, 1.31 * unit]  // mean and deviation, as drawn
  const [l2r, cmi] = controls(says, `<label>α L2R <input type="range" min="0" max="0.5" step="0.01" value="0.1"></label>
    <label>α CMI <input type="range" min="0" max="0.5" step="0.01" value="0.3"></label>`, show)
  shape(svg, "line", { x1: -170, x2: 170, y1: 0, y2: 0, class: "axis" })
  const [ofR, other, ofP, ofBest] = ["hull", "client", "step", "mean"].map(name => shape(svg, "path", { class: name }))
  const names = ["p", "r"].map(name => Object.assign(shape(svg, "text"), { textContent: name }))
  const handles = [handle(svg, p, here, "Mean and deviation of p(z|x)", 130, show), handle(svg, r, here, "Mean and deviation of r(z|y)", 130, show)]
  const curve = (path, [mu, sigma]) => {
    const points = Array.from({ length: 171 }, (_, i) => [2 * i - 170, 45 / Math.max(sigma, 0.35) * Math.exp(-(((2 * i - 170) / unit - mu) ** 2) / 2 / sigma ** 2)])
    put(path, { d: `M${points.map(([x, y]) => `${x},${(-y).toFixed(1)}`).join("L")}` })
  }
  function show() {
    for (const vector of [p, r]) vector[1] = Math.max(vector[1], 0.1 * unit)
    const [ofX, ofY] = [p, r].map(vector => times(1 / unit, vector))
    const found = simplicity(ofX, ofY, +l2r.value, +cmi.value), [mean, deviation] = found.best
    curve(ofR, ofY)
    curve(other, [-ofX[0], ofX[1]])
    curve(ofP, ofX)
    curve(ofBest, [mean, Math.max(deviation, 0.05)])
    handles.forEach(draw => draw());
    [p, r].forEach((vector, k) => put(names[k], { x: vector[0] + 11, y: -vector[1] - 6 }))
    const drowned = (mu, sigma) => Math.abs(mu) < sigma ? "the noise drowns the mean" : "the mean stands out of the noise"
    says.textContent = `α L2R ${(+l2r.value).toFixed(2)}, α CMI ${(+cmi.value).toFixed(2)}. p(z|x), thick: mean ${ofX[0].toFixed(2)}, deviation ${ofX[1].toFixed(2)}, ` +
      `${drowned(...ofX)}. L2R ${found.l2r.toFixed(2)}, CMI ${found.cmi.toFixed(2)}, weighted sum ${found.sum.toFixed(2)}. ` +
      `Red, dashed: where both terms alone would take it, mean ${mean.toFixed(2)} and deviation ${deviation.toFixed(2)}, ${drowned(mean, deviation)}. ` +
      "Thin: an image of another class, mirrored. Drag a dot sideways for the mean, up for the deviation, of p or of r(z|y), shaded; and the two weights."
  }
  show()
}

for (const figure of document.querySelectorAll(".play")) {
  const svg = shape(figure, "svg", { role: "group", "aria-label": figure.dataset.name })
  figure.prepend(svg)
  const says = figure.querySelector("figcaption")
  says.setAttribute("aria-live", "polite")
  ;({ consensus: playConsensus, personalize: playPersonalize, simplicity: playSimplicity, unaligned: playUnaligned })[figure.dataset.play](svg, says)
}
