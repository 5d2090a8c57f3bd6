# The first base of every recipe. The package tells mmengine where to find the bases of mmseg, and
# which types in mmengine's checkpoints torch may load. An import statement is not allowed here.
__import__('mala_mm')
