// The views by workspace and tab, in the order of the navigation. A view is a module of its name, or of several views (`views`) with tabs of their
// own, or it is drawn from parts alone.

import * as source from "meshwright/source.js";
import { parts } from "meshwright/views/sheet.js";

const TABS = {
  plan: {
    Plan: ["overview"], Memory: ["memory"], Time: ["waterfall", "overlap", "timeline"], Traffic: ["roofline"], Ranks: ["ranks"], Goodput: ["goodput"], "Best plans": ["leaders", "heatmap", "pareto"],
    Scaling: ["scaling", "batch"], Sensitivity: ["sensitivity"], Experts: ["experts"], "Published runs": ["published"], Measurements: source.live ? [] : ["sheet"], // only in written files
  },
  learn: { Course: ["learn"], Modeler: ["modeler"], Collectives: ["collectives"], Strategies: ["strategies"] },
  runs: { Runs: ["runs"], Traces: ["traced"], Recordings: ["checked"] },
};
/** Views that are drawn from parts alone: the title, and what to see. */
const SHEETS = {
  memory: ["Memory per GPU", "The peak of the fullest stage, and how activations come and go within a step. " +
    "Early stages hold those of more micro-batches."],
  waterfall: ["What overlap hides", "Communication that no compute hides makes the step longer. What is hidden is free until compute becomes faster."],
  overlap: ["The step with other overlap", ""],
  goodput: ["Goodput and checkpoints", "Saving often wastes time on saves, saving seldom loses work at a failure. " +
    "The curve is flat around its top: half or twice the best interval costs little."],
  leaders: ["The best plans", "The fastest plans that fit, found by the same search as the command plan. “Use” puts a plan into the knobs."],
  batch: ["Efficiency against the batch", "A larger batch gives more compute behind which gradients are reduced, and more micro-batches to fill the pipeline. " +
    "Above the critical batch, more of it buys little."],
  sensitivity: ["What matters most", "Change of this plan’s throughput if one quantity were 20% less (hatched) or 20% more (solid). " +
    "Buy or tune what has the longest bar."],
  experts: ["Load of experts", "All ranks wait for the one whose experts get most tokens. A capacity limits its load and drops what is above."],
  published: ["Predicted against published", ""],
  strategies: ["Strategies side by side", "What each form of parallelism splits, what it sends and when, and when to use it. " +
    "Coloured rows are the strategies that the plan combines."],
};
const draw = (element, data, context) => parts(element, data.parts, context);

/** The views of a module, or the view that is drawn from parts. */
async function viewsOf(name) {
  if (SHEETS[name]) return [{ title: SHEETS[name][0], sentence: SHEETS[name][1], draw }];
  const { view, views } = await import(`meshwright/views/${name}.js`);
  return views ?? [view];
}

const places = Object.entries(TABS).flatMap(([workspace, tabs]) => Object.entries(tabs).flatMap(([tab, names]) => names.map((name) => ({ name, workspace, tab }))));
export const VIEWS = (await Promise.all(places.map(async (place) => (await viewsOf(place.name)).map((view) => ({ ...place, ...view }))))).flat();
