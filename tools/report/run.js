"use strict";
// The charts of a report of runs: several runs are drawn over each other.
(() => {
	const { data, make, chart } = look;
	const runs = data.runs;
	const colorOf = index => `c${[1, 3, 8, 10, 7, 9, 5, 11][index % 8]}`;
	const marks = runs.flatMap(run => run.events.map(event => ({ x: event.step, kind: event.kind })));
	const KINDS = { resume: "resumes", skipped_steps: "skipped steps", spikes: "spikes", rollbacks: "rollbacks", checkpoint: "checkpoints" };
	const there = new Set(marks.map(mark => mark.kind));
	look.markToggles(document.getElementById("marks"), Object.fromEntries(Object.entries(KINDS).filter(([kind]) => there.has(kind))));

	// The first line after a start includes the start-up, so it does not determine the range of times.
	const ignored = new Set(runs.flatMap(run => [0, ...run.starts.map(start => start.step)]
		.map(step => (run.curves.tokens_per_s || { x: [] }).x.find(x => x > step))));
	const TITLES = { loss: ["Loss", ""], lr: ["Learning rate", ""], grad_norm: ["Gradient norm", ""], tokens_per_s: ["Tokens per second", "rate"],
		mfu: ["Model FLOPs utilization", "share"], peak_memory: ["Peak memory", "bytes"], experts: ["Load of experts", ""] };
	const EVALUATED = "evaluation: ";

	function figure(host, title, spec) {
		const box = make("figure", {}, make("figcaption", {}, title));
		document.getElementById(host).append(box);
		chart(box, { label: title, group: "steps", marks, ignored: /^(s|rate|share)$/.test(spec.unit) && ignored, ...spec });
	}

	for (const [key, [title, unit]] of Object.entries(TITLES)) {
		const series = [];
		runs.forEach((run, index) => {
			for (const [name, curve] of Object.entries(run.curves)) {
				const isSet = key === "loss" && name.startsWith(EVALUATED);
				if (name !== key && !isSet) continue;
				for (const [column, y] of Object.entries(curve.y)) {
					const alone = Object.keys(curve.y).length < 2 && key !== "loss";
					const said = isSet ? name.slice(EVALUATED.length) : key === "loss" ? "train" : column.replace(/_bytes$/, "").replaceAll("_", " ");
					series.push({ name: [...runs.length > 1 ? [run.name] : [], ...alone ? [] : [said]].join(": "), x: curve.x, y,
						color: colorOf(runs.length > 1 ? index : series.length), dash: isSet || series.some(each => each.run === run), points: isSet, run });
				}
			}
		});
		if (series.length) figure("curves", title, { unit, series });
	}

	const stacked = curve => Object.entries(curve.y).map(([name, y], index) => ({ name, x: curve.x, y, color: `c${index + 1}` })).filter(each => each.y.some(Boolean));
	for (const run of runs) {
		const title = words => runs.length > 1 ? `${words}: ${run.name}` : words;
		const { time_s: times, time_spread_s: spread, memory_bytes: kinds } = run.curves;
		if (times) figure("parts", title("Time of a step by cause, slowest rank"), { unit: "s", stacked: true, series: stacked(times) });
		if (spread && times) {
			const choice = make("select", {}, ...Object.keys(times.y).filter(cause => spread.y[`${cause}/most`]?.some(Boolean)).map(cause => make("option", {}, cause)));
			const label = make("label", {}, "Cause ", choice);
			const host = make("div");
			const box = make("figure", {}, make("figcaption", {}, title("Spread over ranks")), make("div", { class: "tools" }, label), host);
			document.getElementById("parts").append(box);
			const draw = () => {
				host.replaceChildren();
				look.charts.splice(0, Infinity, ...look.charts.filter(each => each.name !== run));
				const series = ["most", "least"].map((side, index) => ({ name: `${side} of ranks`, x: spread.x, y: spread.y[`${choice.value}/${side}`] || [], color: colorOf(index) }));
				chart(host, { label: `Spread over ranks of ${choice.value}`, group: "steps", marks, ignored, unit: "s", series }).name = run;
			};
			choice.addEventListener("change", draw);
			draw();
		}
		if (kinds) figure("parts", title("Memory by kind, rank with the highest peak"), { unit: "bytes", stacked: true, series: stacked(kinds) });
	}
})();
