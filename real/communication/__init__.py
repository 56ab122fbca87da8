"""Communication: process groups, lanes that run collectives during compute, and streams and clocks of a device."""
