"""Whether a layout computes what one device computes, on a config made small."""
