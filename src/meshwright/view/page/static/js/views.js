// The views in the order of the navigation: each is a module of its name.

import * as source from "meshwright/source.js";

const NAMES = [
  "overview", "memory", "waterfall", "timeline", "roofline", "ranks", "goodput", "leaders", "heatmap", "pareto", "scaling", "batch", "sensitivity", "experts", "published",
  "learn", "modeler", "collectives", "strategies", "runs", "traced", "checked", ...(source.live ? [] : ["sheet"]), // only in written files
];

export const VIEWS = (await Promise.all(NAMES.map((name) => import(`meshwright/views/${name}.js`)))).flatMap(({ view, views }) => views ?? view);
