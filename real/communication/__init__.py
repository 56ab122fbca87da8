"""Communication: process groups, the lanes that carry collectives beside compute, and the streams and clocks of a device."""
