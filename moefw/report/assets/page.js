// Shows the pictures of the page, in the colours of its style sheet, and moves the sliders of heat maps.
(async () => {
  "use strict"
  const page = JSON.parse(document.getElementById("pictures").textContent)
  const drawn = () => { document.documentElement.dataset.drawn = "all" }
  if (page.items.length == 0) return drawn()

  const color = (role) => getComputedStyle(document.documentElement).getPropertyValue(role).trim()
  const font = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"

  // Palette of the 256 levels of load: dead experts and those above twice a fair share have colours of their own.
  function palette(levels) {
    const stops = color("--heat").split(",").map((stop) => rgb(stop.trim()))
    const over = rgb(color("--heat-over"))
    const largest = levels[levels.length - 1]
    return levels.map((share) => {
      if (share == 0) return hex(rgb(color("--heat-dead")))
      if (share > 2) return hex(mixed(stops[stops.length - 1], over, (share - 2) / (largest - 2)))
      const place = share / 2 * (stops.length - 1)
      const below = Math.min(Math.floor(place), stops.length - 2)
      return hex(mixed(stops[below], stops[below + 1], place - below))
    })
  }
  const rgb = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16))
  const mixed = (from, to, part) => from.map((value, at) => Math.round(value + part * (to[at] - value)))
  const hex = (parts) => "#" + parts.map((part) => part.toString(16).padStart(2, "0")).join("")

  function paint(models) {
    const [ink, soft, grid] = [color("--ink"), color("--soft"), color("--grid")]
    for (const model of models) {
      if (model.type.endsWith("Axis")) {
        model.setv({
          axis_line_color: null, major_tick_line_color: null, minor_tick_line_color: null,
          major_label_text_color: soft, major_label_text_font: font, major_label_text_font_size: "12px",
          axis_label_text_color: soft, axis_label_text_font: font, axis_label_text_font_size: "12px",
          axis_label_text_font_style: "normal", axis_label_standoff: 4,
        })
      } else if (model.type == "Grid") {
        model.setv({grid_line_color: model.dimension == 1 ? grid : null})
      } else if (model.type == "BoxAnnotation") {
        model.setv({fill_color: soft, line_color: soft})
      } else if (model.tags.length == 1) {
        const chosen = {value: color(model.tags[0])}
        if ("line_color" in model.properties) model.setv({line_color: chosen})
        if ("fill_color" in model.properties) model.setv({fill_color: chosen})
      }
    }
    page.heats.forEach((heat, number) => {
      const {glyph} = root.get_model_by_name(`heat ${number}`)
      glyph.color_mapper.palette = palette(heat.levels)
    })
  }

  function slide(heat, number) {
    const bytes = Uint8Array.from(atob(heat.loads), (letter) => letter.charCodeAt(0))
    const cells = heat.layers.length * heat.experts
    const {data_source} = root.get_model_by_name(`heat ${number}`)
    const image = data_source.data.image[0]
    const input = document.getElementById(`window-${number}`)
    const output = document.getElementById(`steps-${number}`)
    const show = () => {
      const at = Number(input.value)
      image.set(bytes.subarray(at * cells, (at + 1) * cells))
      data_source.change.emit()
      const [first, last] = [heat.first[at].toLocaleString("en"), heat.last[at].toLocaleString("en")]
      output.textContent = first == last ? `step ${first}` : `steps ${first} to ${last}`
    }
    input.addEventListener("input", show)
    show()
    root.get_model_by_name(`hover of heat ${number}`).tooltips = (_, {image_index: {i, j, flat_index}}) =>
      written([[`layer ${heat.layers[heat.layers.length - 1 - j]}, expert ${i}`, `${heat.levels[image[flat_index]]}`]])
  }

  // Rows of labels and values, as text, for a tooltip. It has a style sheet of its own, so that colours are set here.
  function written(rows) {
    const table = document.createElement("div")
    table.style.cssText = "display: grid; grid-template-columns: auto auto; gap: 0 0.8rem"
    for (const [label, value] of rows) {
      const [left, right] = [document.createElement("span"), document.createElement("span")]
      left.style.color = "var(--soft)"
      right.style.textAlign = "right"
      left.textContent = label
      right.textContent = value
      table.append(left, right)
    }
    return table
  }
  const count = (step) => Math.round(step).toLocaleString("en")
  const short = (value) => Number.isFinite(value) ? String(Number(value.toPrecision(4))) : "none"

  // The numbers at the pointer: the step, or the steps of a bucket, and of each curve its mean, least and most there.
  function tell(rows, number) {
    root.get_model_by_name(`hover ${number}`).tooltips = (source, {index}) => {
      const at = (name) => source.data[name]?.[index]
      const [step, first, last] = ["step", "first", "last"].map(at)
      const one = first === undefined || first == last
      const steps = one ? ["step", count(step)] : ["steps", `${count(first)} to ${count(last)}`]
      return written([steps, ...rows.map(([label, columns]) => {
        const [mean, least, most] = columns.map((column) => short(at(column)))
        return [label, least === undefined ? mean ?? "" : `${mean} (${least} to ${most})`]
      })])
    }
  }

  Bokeh.logger.set_level("error")
  await Bokeh.embed.embed_items(page.documents, page.items)
  const root = Bokeh.documents[0]
  const models = [...new Set(root.roots().flatMap((figure) => [...figure.references()]))]
  paint(models)
  page.heats.forEach(slide)
  page.hovers.forEach(tell)
  for (const figure of root.roots()) {
    figure.on_event("doubletap", () => figure.x_range.reset())
    if (window.matchMedia("(pointer: coarse)").matches) figure.toolbar.active_drag = null  // a finger scrolls
  }
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => paint(models))
  drawn()
})()
