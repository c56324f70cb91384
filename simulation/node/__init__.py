"""A node whose engine runs on the event loop of its frontend, on a simulated device."""
