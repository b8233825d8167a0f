// The views in the order of the navigation: one import and one entry each.

import { view as leaders } from "meshwright/views/leaders.js";
import { view as learn } from "meshwright/views/learn.js";
import { view as memory } from "meshwright/views/memory.js";
import { view as modeler } from "meshwright/views/modeler.js";
import { view as overview } from "meshwright/views/overview.js";
import { view as verdict } from "meshwright/views/verdict.js";
import { view as waterfall } from "meshwright/views/waterfall.js";

export const GROUPS = ["this plan", "all plans", "learn", "runs"];
export const VIEWS = [
  overview,
  verdict,
  memory,
  waterfall,
  leaders,
  learn,
  modeler,
];
