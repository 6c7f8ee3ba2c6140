include $(sort $(wildcard $(BR2_EXTERNAL_GEMRUN_PATH)/package/*/*.mk))
