// The views in the order of the navigation: one import and one entry each.

import { view as memory } from "meshwright/views/memory.js";
import { view as waterfall } from "meshwright/views/waterfall.js";

export const GROUPS = ["this plan", "all plans", "learn", "runs"];
export const VIEWS = [memory, waterfall];
