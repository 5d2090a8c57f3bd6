# One line of OpenMMLab packages installs the module mmseg under another name than mmengine expects
# behind `mmseg::`. Loaded before any such base, this makes mmengine look for the module itself.
from mmengine.config.utils import MODULE2PACKAGE

MODULE2PACKAGE['mmseg'] = 'mmseg'
del MODULE2PACKAGE
