"use strict";
// Draws memory and time by cause, priced layouts and the mesh.
(() => {
	const { data, make, show } = look;
	const find = id => document.getElementById(id);
	const by = key => (one, other) => one[key] - other[key];
	const best = data.strategies[0], x = "memory_gib", y = "tokens_per_s_per_gpu";

	function bars(title, figures, unit) {
		const rows = Object.entries(figures).filter(([name, value]) => name !== "total" && value > 0);
		rows.sort(by(1)).reverse();
		const list = make("dl", { class: "bars" });
		for (const [name, value] of rows) {
			const bar = make("span");
			bar.style.width = `${100 * value / rows[0][1]}%`;
			list.append(make("dt", {}, name), make("dd", {}, bar, `${show(value)} ${unit}`));
		}
		find("causes").append(make("section", { class: "card" }, make("h3", {}, title), list));
	}
	if (best) {
		bars(`Memory of pipeline rank ${best.worst_rank}`, best[x], "GiB");
		bars("Time of a step", best.time_s, "s");
	}

	const rows = data.priced.layouts.map((row, index) => ({ ...row, index, shown: true })).sort(by(x));
	const memory = rows.map(row => row[x]), usable = data.input.usable_gib;
	const kinds = { fits: "c1", "in the table": "c8", "does not fit": "faint", selected: "text" };
	const marks = [{ x: usable, kind: "bad" }, { kind: "text" }];
	const columns = [[], [], [], []];
	const kindOf = row => row.index < data.strategies.length ? 1 : row.fits ? 0 : 2;
	const valueOf = (row, key) => String(row.parallel[key] ?? (key === "recompute" ? "none" : 1));
	const figures = row => `${show(row[x])} GiB, ${show(row[y])} tokens/s per GPU` + (row.fits ? "" : ", does not fit");
	const lines = (row, sign) => Object.entries(row.parallel).map(([key, value]) => `${key}${sign}${value}`);

	const title = make("h3"), facts = make("p", { role: "status" }), section = make("pre"), copy = make("button", { type: "button" });
	const figure = make("figure", {}, make("figcaption", {}, "tokens/s per GPU by GiB of memory; red: usable memory"));
	const filters = make("div", { class: "tools" }), count = make("span", { class: "faint", role: "status" });
	const usage = "Click or use the arrow keys to see a layout's section of a recipe. 0 shows all.";
	const hint = make("p", { class: "faint hint" }, usage);
	find("priced").append(figure, make("section", { class: "card", id: "layout" }, title, facts, section, copy));
	figure.append(filters);
	copy.addEventListener("click", () => {
		getSelection().selectAllChildren(section);
		if (document.execCommand("copy")) copy.textContent = "Copied";
	});

	let visible = rows, selected, chart;
	function draw() {
		rows.forEach((row, at) => columns.forEach((column, kind) =>
			column[at] = (kind === 3 ? row === selected : row.shown && kind === kindOf(row)) ? row[y] : null));
		if (chart) chart.plot.redraw();
		count.textContent = `${visible.length} of ${rows.length} layouts`;
	}
	function select(row) {
		selected = row;
		marks[1].x = row[x];
		title.textContent = `${row.index ? "Selected" : best ? "Recommended" : "Nearest"} layout`;
		facts.textContent = figures(row);
		section.textContent = ["parallel:", ...lines(row, ": ")].join("\n  ");
		copy.textContent = "Copy";
		draw();
	}

	const selects = {};
	for (const key of ["tp", "pp", "virtual_stages", "cp", "ep", "dp_shard", "dp_replicate", "microbatch_size", "recompute", "sharding"]) {
		const values = [...new Set(rows.map(row => valueOf(row, key)))].sort((one, other) => one - other || 0);
		if (values.length < 2) continue;
		const choice = make("select", {}, make("option", { value: "" }, "any"), ...values.map(value => make("option", {}, value)));
		selects[key] = row => !choice.value || choice.value === valueOf(row, key);
		choice.addEventListener("change", () => {
			visible = rows.filter(row => row.shown = Object.values(selects).every(matches => matches(row)));
			draw();
		});
		filters.append(make("label", {}, `${key} `, choice));
	}
	filters.append(count);
	select(rows.find(row => row.index === 0));

	const low = Math.min(memory[0], usable), high = Math.max(memory.at(-1), usable), margin = (high - low || 1) / 99;
	chart = look.chart(figure, {
		label: "Priced layouts", xLabel: "GiB", height: 400, points: true,
		xRange: () => [low - margin, high + margin], marks,
		series: Object.entries(kinds).map(([name, color], kind) => ({ name, color, x: memory, y: columns[kind] })),
		onCursor: () => {
			const row = chart && nearest();
			hint.textContent = row ? `${lines(row, "=").join(" ")}: ${figures(row)}` : usage;
		},
	});
	if (best && high > 1.3 * usable) {
		chart.zoomed = [low - margin, 1.2 * usable];
		chart.draw();
	}
	figure.append(hint);

	// Returns the visible layout within 25 pixels of the cursor.
	function nearest() {
		const { plot } = chart, { left, top } = plot.cursor;
		let found, least = 25;
		for (const row of visible) {
			const far = Math.hypot(plot.valToPos(row[x], "x") - left, plot.valToPos(row[y], "y") - top);
			if (far < least) [found, least] = [row, far];
		}
		return found;
	}
	const view = figure.querySelector(".chart");
	let pressed = 0;
	view.addEventListener("pointerdown", event => pressed = event.clientX);
	view.addEventListener("click", event => {
		const row = nearest();
		if (row && Math.abs(event.clientX - pressed) < 4) select(row);
	});
	// Left and right go by memory, up and down by speed.
	view.addEventListener("keydown", event => {
		const step = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, Enter: 0 }[event.key];
		if (step === undefined) return;
		if (!step) copy.focus();
		const key = /Up|Down/.test(event.key) ? y : x, { min, max } = chart.plot.scales.x;
		const order = visible.filter(row => row[x] >= min && row[x] <= max).sort(by(key));
		select(order[order.indexOf(selected) + step] || selected);
		event.preventDefault();
		event.stopImmediatePropagation();
	}, true);

	// Buttons in the first table, of strategies or else of rejected layouts.
	const table = document.querySelector("table.data");
	table.tHead.rows[0].append(make("th", { scope: "col" }, "layout"));
	[...table.tBodies[0].rows].forEach((line, index) => {
		const button = make("button", { type: "button" }, `show ${index + 1}`);
		button.addEventListener("click", () => {
			select(rows.find(row => row.index === index));
			section.scrollIntoView({ block: "center" });
		});
		line.append(make("td", { "data-label": "layout" }, button));
	});

	function svg(tag, attributes, ...children) {
		const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
		Object.entries(attributes).forEach(pair => element.setAttribute(...pair));
		element.append(...children);
		return element;
	}
	// Draws the nodes of ranks that exchange data over an axis.
	function nodes(axis, per) {
		const ranks = Array.from({ length: axis.size }, (_, index) => index * axis.stride);
		const all = [...new Set(ranks.map(rank => Math.floor(rank / per)))], shown = all.slice(0, 8), wide = per * 13 + 5;
		const pictures = shown.map(node => svg("svg", { width: wide, viewBox: `0 0 ${wide} 38` },
			svg("rect", { class: "node", x: 1, y: 1, width: wide - 2, height: 20, rx: 4 }),
			svg("text", { x: 1, y: 35 }, `node ${node}`),
			...Array.from({ length: per }, (_, gpu) => svg("rect", { class: ranks.includes(node * per + gpu) ? "own" : "gpu", x: 4 + gpu * 13, y: 6, width: 10, height: 10, rx: 2 }))));
		return make("div", { class: "nodes", role: "img", "aria-label": `${axis.size} ranks, ${all.length} nodes` }, ...pictures, all.length > 8 ? `and ${all.length - 8} more` : "");
	}
	if (best) {
		const links = data.input.hardware, mesh = find("mesh");
		mesh.append(make("p", {}, "The marked ranks exchange data with rank 0. Bytes per step are those of the GPU that sends most."));
		for (const axis of data.mesh.axes.filter(axis => axis.size > 1)) {
			const link = axis.nodes === 1 ? `within a node, ${links.node_gb_per_s} GB/s` : `across ${axis.nodes} nodes, ${links.network_gb_per_s} GB/s`;
			mesh.append(make("section", { class: "card axis" }, make("h3", {}, `${axis.axis} ${axis.size}`),
				make("span", { class: "faint" }, link), make("b", {}, `${show(axis.sent_gib)} GiB`), nodes(axis, Math.min(data.mesh.gpus_per_node, data.input.gpus))));
		}
	}
})();
