/* One method table per topic file; module.c collects them. */
#ifndef AGENTGRPO_METHODS_H
#define AGENTGRPO_METHODS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyMethodDef agentgrpo_delta_methods[];
extern PyMethodDef agentgrpo_sandbox_files_methods[];
extern PyMethodDef agentgrpo_sandbox_spawn_methods[];
extern PyMethodDef agentgrpo_sandbox_step_methods[];

#endif
