"""Case studies: published training set-ups as planner inputs, with the choices their authors made."""
