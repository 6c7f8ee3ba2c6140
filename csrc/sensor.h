/* sensor.h: the temperature for the gemrun command: a thread reads a sensor and tells a context.
 *
 * Sources as gemctl names them, and thermal zones by their type:
 *     file:PATH[:SCALE]   hwmon:NAME/tempN   iio:NAME/CHANNEL   zone:TYPE
 * SCALE: what the file's number is multiplied with for degrees Celsius, 0.001 for thousandths.
 * A file outside /proc and /sys counts as read when it has changed: what nobody writes any more
 * becomes old. */
#ifndef SENSOR_H
#define SENSOR_H

#include <stddef.h>

#include "gemrun_thermal.h"

typedef struct sensor sensor;

/* Begin to tell `ctx`; `root` is put before /sys ("" but in tests). NULL: what is wrong, and what
 * to do, is in `wrong`. */
sensor *sensor_start(const char *source, const char *root, gemrun_context_t *ctx, char *wrong,
                     size_t capacity);
/* Nothing is told after this. NULL is fine. */
void sensor_stop(sensor *s);

#endif
