// One colour and pattern for each part of the step and of memory, the same in every view.

/** Parts of the step and streams. */
export const STEP = {
  compute: { colour: "compute" }, recompute: { colour: "recompute", pattern: "hatch" }, interference: { colour: "compute", pattern: "dots" },
  tp: { colour: "tp" }, cp: { colour: "cp" }, ep: { colour: "ep" }, pp: { colour: "pp" }, dp: { colour: "dp" }, offload: { colour: "host", pattern: "cross" },
  bubble: { colour: "bubble", pattern: "hatch" }, host: { colour: "host", pattern: "dots" }, optimizer: { colour: "optimizer" }, overhead: { colour: "host" },
};

/** Parts of memory, in the order of the bars. */
const MEMORY = {
  parameters: { colour: "parameters" }, gradients: { colour: "gradients" }, optimizer: { colour: "states" }, activations: { colour: "activations" },
  gathered: { colour: "gathered" }, working: { colour: "working" }, context: { colour: "context", pattern: "dots" }, slack: { colour: "slack", pattern: "hatch" },
};

/** Colour and pattern of a part of the step; parts without an entry are compute. */
export const step = (part) => STEP[part] ?? STEP.compute;
/** Colour and pattern of a part of memory. */
export const memory = (part) => MEMORY[part] ?? { colour: "host" };
/** Names of grouped parts for legends. */
export const NAMES = { compute: "compute", tp: "tensor parallel", cp: "context parallel", ep: "expert parallel", pp: "pipeline messages", dp: "data parallel", bubble: "bubble", host: "host", optimizer: "optimizer", overhead: "overhead", offload: "offload" };
