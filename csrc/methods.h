/* A method table or type for each topic file; module.c collects them. */
#ifndef AGENTGRPO_METHODS_H
#define AGENTGRPO_METHODS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

extern PyMethodDef agentgrpo_sandbox_files_methods[];
extern PyMethodDef agentgrpo_sandbox_landlock_methods[];
extern PyMethodDef agentgrpo_sandbox_memory_methods[];
extern PyMethodDef agentgrpo_sandbox_spawn_methods[];
extern PyMethodDef agentgrpo_sandbox_step_methods[];

extern PyType_Spec agentgrpo_plan_spec;

#endif
