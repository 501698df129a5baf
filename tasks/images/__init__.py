"""The task that classifies images: files in the format of MNIST, drawn images, and ResNets."""
