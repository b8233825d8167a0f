// The views in the order of the navigation: one import and one entry each.

import { view as leaders } from "meshwright/views/leaders.js";
import { view as memory } from "meshwright/views/memory.js";
import { view as overview } from "meshwright/views/overview.js";
import { view as waterfall } from "meshwright/views/waterfall.js";

export const GROUPS = ["this plan", "all plans", "learn", "runs"];
export const VIEWS = [
  overview,
  memory,
  waterfall,
  leaders,
];
