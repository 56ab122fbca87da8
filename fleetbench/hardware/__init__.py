"""Hardware: what data sheets say of GPUs, and clusters by name."""
