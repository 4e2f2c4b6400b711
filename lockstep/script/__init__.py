"""Where the user's script is: the place of a step, which every worker must agree on before the step counts."""
