"""Speed: of decoding against peers and the roofline, and of the MLP kernels alone."""
