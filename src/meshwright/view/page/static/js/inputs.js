// The inputs: every change of a field changes the state.

import * as source from "meshwright/source.js";

export function begin(form, actions) {}
export function follow(state) {}
