// The views by workspace and tab, in the order of the navigation: each is a module of its name, or of several views (`views`) with tabs of their own.

import * as source from "meshwright/source.js";

const TABS = {
  plan: {
    Plan: ["overview"], Memory: ["memory"], Time: ["waterfall", "timeline"], Traffic: ["roofline"], Ranks: ["ranks"], Goodput: ["goodput"], "Best plans": ["leaders", "heatmap", "pareto"],
    Scaling: ["scaling", "batch"], Sensitivity: ["sensitivity"], Experts: ["experts"], "Published runs": ["published"], Measurements: source.live ? [] : ["sheet"], // only in written files
  },
  learn: { Course: ["learn"], Modeler: ["modeler"], Collectives: ["collectives"], Strategies: ["strategies"] },
  runs: { Runs: ["runs"], Traces: ["traced"], Recordings: ["checked"] },
};
const places = Object.entries(TABS).flatMap(([workspace, tabs]) => Object.entries(tabs).flatMap(([tab, names]) => names.map((name) => ({ name, workspace, tab }))));

export const VIEWS = (await Promise.all(places.map(({ name }) => import(`meshwright/views/${name}.js`)))).flatMap(({ view, views }, i) => (views ?? [view]).map((one) => ({ ...places[i], ...one })));
