"use strict";
// Charts and tables of all reports. Values come from look.data and reach the document only as text.
const look = (() => {
	const data = JSON.parse(document.getElementById("data").textContent);
	const color = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
	const charts = [];
	const hiddenMarks = new Set();

	// Returns a new element. Children are elements or plain text.
	function make(tag, attributes = {}, ...children) {
		const element = document.createElement(tag);
		for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
		element.append(...children);
		return element;
	}

	const plain = value => {
		const size = Math.abs(value);
		if (size && (size < 1e-3 || size >= 1e15)) return value.toExponential(2);
		return value.toLocaleString("en", size >= 1e4 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 4 });
	};
	const scaled = (value, base, units) => {
		let power = 0;
		while (Math.abs(value) >= base && power < units.length - 1) [value, power] = [value / base, power + 1];
		return `${plain(value)} ${units[power]}`.trim();
	};
	const formats = {
		"": plain,
		bytes: value => scaled(value, 1024, ["B", "KiB", "MiB", "GiB", "TiB"]),
		s: value => value ? scaled(value * 1e6, 1e3, ["µs", "ms", "s"]) : "0 s",
		share: value => `${plain(100 * value)}%`,
		rate: value => scaled(value, 1e3, ["", "k", "M", "G"]),
	};
	const show = (value, unit) => value == null ? "–" : formats[unit || ""](value);

	// Draws a chart into `host`. spec: {label, unit, xLabel, xRange, height, stacked, points, ignored, marks: [{x, kind}],
	// series: [{name, x, y, color, dash, points}]}. Charts of the same `group` zoom together.
	function chart(host, spec) {
		const view = make("div", { class: "chart", tabindex: "0", role: "group", "aria-label":
			`${spec.label}. Chart: arrow keys read values, plus and minus zoom, 0 resets.` });
		const legend = make("div", { class: "legend" });
		const at = make("span", { class: "faint" });
		const shown = spec.series.map(() => true);
		const values = [];
		host.append(view, legend);
		legend.append(at);
		spec.series.forEach((series, index) => {
			const swatch = make("i", series.dash ? { class: "dash" } : {});
			swatch.style.background = `var(--${series.color})`;
			const value = make("b");
			const button = make("button", { type: "button", "aria-pressed": "true" }, swatch, series.name, value);
			button.addEventListener("click", () => {
				shown[index] = !shown[index];
				button.setAttribute("aria-pressed", shown[index]);
				draw();
			});
			values.push(value);
			legend.append(button);
		});
		const shared = spec.series.every(series => series.x === spec.series[0].x);
		const joined = shared ? [spec.series[0].x, ...spec.series.map(series => series.y)]
			: uPlot.join(spec.series.map(series => [series.x, series.y]));
		const [first, last] = [joined[0][0], joined[0].at(-1)];
		const self = { plot: null, draw, group: spec.group, zoomed: null, full: spec.xRange ? spec.xRange(null, -Infinity, Infinity)
			: first < last ? [first, last] : [first - 1, first + 1] };

		const size = () => ({ width: Math.max(view.clientWidth, 200), height: spec.height || 220 });

		function table() { // A hidden series does not count in a stack.
			if (!spec.stacked) return joined;
			const sum = joined[0].map(() => 0);
			return [joined[0], ...joined.slice(1).map((column, index) =>
				shown[index] ? column.map((value, row) => sum[row] += value || 0) : sum.slice())];
		}

		function read(plot) {
			const row = plot.cursor.idx ?? joined[0].length - 1;
			at.textContent = `${spec.xLabel || "step"} ${show(joined[0][row])}`;
			spec.series.forEach((series, index) => {
				let near = row; // Runs with different steps: the last value before the cursor.
				while (!shared && near > 0 && joined[index + 1][near] == null) near--;
				values[index].textContent = show(joined[index + 1][near], spec.unit);
			});
		}

		function marks(plot) {
			const { ctx, bbox } = plot;
			ctx.save();
			for (const mark of spec.marks || []) {
				const x = plot.valToPos(mark.x, "x", true);
				if (hiddenMarks.has(mark.kind) || x < bbox.left || x > bbox.left + bbox.width) continue;
				const pixel = devicePixelRatio, foot = bbox.top + bbox.height;
				ctx.strokeStyle = ctx.fillStyle = color(mark.kind);
				ctx.lineWidth = 1.5 * pixel;
				ctx.setLineDash(mark.kind === "resume" ? [] : [4 * pixel, 3 * pixel]);
				ctx.beginPath();
				if (mark.kind === "checkpoint") { // A small triangle on the axis.
					[[-5, 0], [5, 0], [0, -8]].forEach(([right, down]) => ctx.lineTo(x + right * pixel, foot + down * pixel));
					ctx.fill();
				} else {
					ctx.moveTo(x, bbox.top); ctx.lineTo(x, foot);
					ctx.stroke();
				}
			}
			ctx.restore();
		}

		// Fits y to the visible rows, except the ignored ones: a point above the range leaves the chart at its top.
		function range(plot, low, high) {
			let [least, most] = [Infinity, -Infinity];
			const [from, to] = plot.series[0].idxs || [0, -1];
			for (const column of plot.data.slice(1)) for (let row = from; row <= to; row++) {
				if (column[row] == null || (spec.ignored && spec.ignored.has(plot.data[0][row]))) continue;
				least = Math.min(least, column[row]); most = Math.max(most, column[row]);
			}
			if (least > most) [least, most] = [low ?? 0, high ?? 1];
			return uPlot.rangeNum(spec.stacked ? 0 : least, most, 0.1, true);
		}

		function draw() {
			if (self.plot) self.plot.destroy();
			const grid = { stroke: color("grid"), width: 1 };
			const axis = { stroke: color("faint"), grid, ticks: grid, font: "12px system-ui" };
			self.plot = new uPlot({
				...size(),
				legend: { show: false },
				scales: { x: { time: false, range: () => self.zoomed || self.full }, y: { range: spec.ignored || spec.stacked ? range : undefined } },
				axes: [{ ...axis, size: 34, values: (plot, ticks) => ticks.map(tick => show(tick)) },
					{ ...axis, size: 68, incrs: spec.unit === "bytes" ? Array.from({ length: 50 }, (_, power) => 2 ** power) : undefined, values: (plot, ticks) => ticks.map(tick => tick == null ? "" : show(tick, spec.unit)) }],
				series: [{}, ...spec.series.map((series, index) => ({
					show: shown[index] || !!spec.stacked,
					stroke: color(series.color),
					width: spec.stacked ? 0.5 : 1.5,
					fill: spec.stacked && color(series.color),
					dash: series.dash ? [6, 4] : [],
					spanGaps: true,
					points: { show: series.points || spec.points || joined[0].length < 2, size: 6, fill: color(series.color) },
					paths: spec.points && (() => null),
				}))],
				bands: spec.stacked ? spec.series.slice(1).map((_, index) => ({ series: [index + 2, index + 1] })) : [],
				cursor: { y: false, bind: { dblclick: () => null }, sync: spec.group ? { key: spec.group, scales: ["x", null] } : undefined,
					drag: { x: true, y: false, setScale: false }, points: { show: !spec.stacked }, focus: { prox: 24 } },
				hooks: {
					setCursor: [plot => { read(plot); if (spec.onCursor) spec.onCursor(plot); }],
					setSelect: [plot => {
						if (plot.select.width > 4) zoom(plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x"));
						plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
					}],
					draw: [marks],
				},
			}, table(), view);
			read(self.plot);
		}

		// Zooms all charts of the group, or back to the full range without arguments.
		function zoom(min, max) {
			for (const each of charts.filter(each => each === self || (spec.group && each.group === spec.group))) {
				each.zoomed = min === undefined ? null : [min, max];
				const [low, high] = each.zoomed || each.full;
				each.plot.setScale("x", { min: low, max: high });
			}
		}

		view.addEventListener("dblclick", () => zoom());
		view.addEventListener("keydown", event => {
			const { plot } = self, { min, max } = plot.scales.x, rows = joined[0];
			let row = plot.cursor.idx ?? (event.key === "ArrowLeft" ? rows.length : -1);
			const middle = plot.cursor.idx == null ? (min + max) / 2 : rows[row];
			const wide = (max - min) * { "+": 0.25, "=": 0.25, "-": 1 }[event.key];
			if (wide) {
				const low = Math.max(self.full[0], middle - wide), high = Math.min(self.full[1], middle + wide);
				if (low <= self.full[0] && high >= self.full[1]) zoom(); else zoom(low, high);
			} else if (event.key === "0" || event.key === "Escape") zoom();
			else if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
				const pixel = (max - min) / plot.over.clientWidth, from = rows[row] ?? -Infinity, step = event.key === "ArrowLeft" ? -1 : 1;
				do row += step; while (rows[row] !== undefined && Math.abs(rows[row] - from) < pixel);
				row = Math.min(Math.max(row, rows.findIndex(x => x >= min)), rows.findLastIndex(x => x <= max));
				plot.setCursor({ left: plot.valToPos(rows[row], "x"), top: 1 });
			} else return;
			event.preventDefault();
		});
		new ResizeObserver(() => self.plot.setSize(size())).observe(view);
		charts.push(self);
		draw();
		return self;
	}

	// Makes a table sortable by its heads. With data-filter, adds a field that filters its rows.
	function enhance(table) {
		const heads = [...table.tHead.rows[0].cells];
		const body = table.tBodies[0];
		const rows = [...body.rows];
		const keyOf = (row, column) => {
			const cell = row.cells[column];
			return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
		};
		rows.forEach(row => [...row.cells].forEach((cell, column) => cell.setAttribute("data-label", heads[column].textContent)));
		heads.forEach((head, column) => {
			const button = make("button", { type: "button" }, ...head.childNodes);
			if (rows.length && rows[0].cells[column].className === "number") head.className = "number";
			head.append(button);
			button.addEventListener("click", () => {
				const up = head.getAttribute("aria-sort") !== "ascending";
				heads.forEach(each => each.removeAttribute("aria-sort"));
				head.setAttribute("aria-sort", up ? "ascending" : "descending");
				const sorted = rows.slice().sort((one, other) => {
					const a = keyOf(one, column), b = keyOf(other, column);
					const order = typeof a === "number" && typeof b === "number" ? a - b
						: String(a).localeCompare(String(b), "en", { numeric: true });
					return up ? order : -order;
				});
				body.append(...sorted);
			});
		});
		if (table.dataset.filter === undefined) return;
		const field = make("input", { type: "search" });
		const count = make("span", { class: "faint", role: "status" });
		const apply = () => {
			const words = field.value.toLowerCase().split(/\s+/);
			const matches = row => words.every(word => row.textContent.toLowerCase().includes(word)) && (!table.keep || table.keep(row));
			rows.forEach(row => row.hidden = !matches(row));
			count.textContent = `${rows.filter(row => !row.hidden).length} of ${rows.length}`;
		};
		field.addEventListener("input", apply);
		table.refilter = apply; // Scripts may set table.keep = row => boolean and call this.
		table.before(make("div", { class: "tools" }, make("label", {}, "Filter ", field), count));
		apply();
	}

	// Adds a checkbox per kind of mark, which shows or hides these marks in all charts.
	function markToggles(host, kinds) {
		for (const [kind, title] of Object.entries(kinds)) {
			const box = make("input", { type: "checkbox" });
			const name = make("span", {}, title);
			name.style.borderBottom = `3px solid var(--${kind})`;
			box.checked = true;
			box.addEventListener("change", () => {
				box.checked ? hiddenMarks.delete(kind) : hiddenMarks.add(kind);
				charts.forEach(each => each.plot.redraw(false));
			});
			host.append(make("label", {}, box, " ", name));
		}
	}

	document.querySelectorAll("table.data").forEach(enhance);
	matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.forEach(each => each.draw()));
	return { data, color, make, show, chart, charts, markToggles };
})();
