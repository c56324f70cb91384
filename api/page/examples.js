// Example prompts by the model's name at the router.

export const EXAMPLES = {
  "baton-demo": [
    "add 27 15 =",
    "copy red fox moon =",
    "reverse a b c d =",
    "anna = paris, bob = rome, carl = oslo, bob =",
  ],
};
