// The views in the order of the navigation: one import and one entry each.

import { view as batch } from "meshwright/views/batch.js";
import { view as checked } from "meshwright/views/checked.js";
import { view as collectives } from "meshwright/views/collectives.js";
import { view as goodput } from "meshwright/views/goodput.js";
import { view as heatmap } from "meshwright/views/heatmap.js";
import { view as leaders } from "meshwright/views/leaders.js";
import { view as learn } from "meshwright/views/learn.js";
import { view as memory } from "meshwright/views/memory.js";
import { view as modeler } from "meshwright/views/modeler.js";
import { view as overlap } from "meshwright/views/overlap.js";
import { view as overview } from "meshwright/views/overview.js";
import { view as pareto } from "meshwright/views/pareto.js";
import { view as published } from "meshwright/views/published.js";
import { view as ranks } from "meshwright/views/ranks.js";
import { view as roofline } from "meshwright/views/roofline.js";
import { view as scaling } from "meshwright/views/scaling.js";
import { view as sensitivity } from "meshwright/views/sensitivity.js";
import { view as sheet } from "meshwright/views/sheet.js";
import { view as stages } from "meshwright/views/stages.js";
import { view as strategies } from "meshwright/views/strategies.js";
import { view as timeline } from "meshwright/views/timeline.js";
import { views as runs } from "meshwright/views/runs.js";
import { view as traced } from "meshwright/views/traced.js";
import { view as waterfall } from "meshwright/views/waterfall.js";
import { view as zero } from "meshwright/views/zero.js";
import * as source from "meshwright/source.js";

export const VIEWS = [
  overview,
  memory,
  waterfall,
  timeline,
  stages,
  roofline,
  ranks,
  goodput,
  leaders,
  heatmap,
  pareto,
  scaling,
  batch,
  sensitivity,
  published,
  learn,
  modeler,
  collectives,
  strategies,
  zero,
  overlap,
  ...runs,
  traced,
  checked,
  ...(source.live ? [] : [sheet]), // only in written files
];
