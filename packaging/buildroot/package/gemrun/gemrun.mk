################################################################################
#
# gemrun
#
################################################################################

GEMRUN_VERSION = 0.1.0
# This tree lies in packaging/buildroot of the sources.
GEMRUN_SITE = $(BR2_EXTERNAL_GEMRUN_PATH)/../..
GEMRUN_SITE_METHOD = local
GEMRUN_LICENSE = Apache-2.0
GEMRUN_LICENSE_FILES = LICENSE
GEMRUN_INSTALL_STAGING = YES
GEMRUN_SUPPORTS_IN_SOURCE_BUILD = NO
GEMRUN_CONF_OPTS = -DCMAKE_BUILD_TYPE=Release

ifeq ($(BR2_PACKAGE_GEMRUN_PLAIN_KERNELS),y)
GEMRUN_CONF_OPTS += -DGEM_BASE_ONLY=ON
endif

ifeq ($(BR2_PACKAGE_GEMRUN_COMMAND),)
define GEMRUN_REMOVE_COMMAND
	rm -f $(TARGET_DIR)/usr/bin/gemrun
endef
GEMRUN_POST_INSTALL_TARGET_HOOKS += GEMRUN_REMOVE_COMMAND
endif

$(eval $(cmake-package))
