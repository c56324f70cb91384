// Prompts that a model is known to answer, by what the router calls it.

export const EXAMPLES = {
  "baton-demo": [
    "add 27 15 =",
    "copy red fox moon =",
    "reverse a b c d =",
    "anna = paris, bob = rome, carl = oslo, bob =",
  ],
};
