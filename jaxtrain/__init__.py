"""jaxtrain: plan on a laptop, prove on fake devices, train on the cluster, with one program."""
